"""Prints how far the client's times are from the truth server's, and what a chunk costs it.

Run as `python tests/bench_client.py [requests]`; a benchmark, not a test: a busy machine shows in its p99.
"""

import gc
import statistics
import sys
import time

import truth_server

from llmrepro import metrics
from llmrepro.client import Question, ask

TOKENS = 48
GAP_S = 0.004  # 250 tok/s: a slower engine makes the relative error smaller
LONG_TOKENS = 2000


def main(requests: int = 400) -> None:
    receive_ms, whole_ms, decode_pct = [], [], []
    with truth_server.start() as server:
        for i in range(requests + 5):  # the first five warm both processes up
            dialect = ("llama.cpp", "vllm")[i % 2]
            option = {"timings_per_token": True} if i % 2 == 0 else {"return_token_ids": True}
            endpoint = ("/v1/chat/completions", "/v1/completions")[i // 2 % 2]
            script = {"dialect": dialect, "ttft_s": 0.02 + 0.0007 * (i % 11), "gap_s": GAP_S, "finish": "stop"}
            record = ask(
                server.url,
                Question(
                    endpoint,
                    {
                        "messages": [{"role": "user", "content": "hi"}],
                        "prompt": "hi",
                        "max_tokens": TOKENS,
                        "script": script,
                        **option,
                    },
                ),
            )
            assert record.status == "ok" and record.output_tokens == TOKENS + 1, record
            if i < 5:
                continue
            log = server.truth()[-1]
            first_ns = next(ns for ns, _, has_text, _ in log["sent"] if has_text)
            last_ns = max(ns for ns, tokens, _, _ in log["sent"] if tokens)
            ttft_ms = metrics.ttft_s(record) * 1e3
            receive_ms.append(ttft_ms - (first_ns - record.t_send_ns) / 1e6)
            whole_ms.append(ttft_ms - (first_ns - log["recv_ns"]) / 1e6)
            true_tps = TOKENS / (last_ns - first_ns) * 1e9
            decode_pct.append(abs(metrics.decode_tps(record) / true_tps - 1) * 100)
        cpu_us = [cpu_per_chunk_us(server) for _ in range(5)]
    print(
        f"{requests} requests of {TOKENS} tokens at {1 / GAP_S:.0f} tok/s: "
        "the llama.cpp and vLLM dialects, chat and completions in turn"
    )
    show("TTFT error against the server's send", receive_ms, "ms", "target 0.5 median, 2 p99")
    show("TTFT less the server's own, sending included", whole_ms, "ms", "")
    show("decode error", decode_pct, "%", "target 0.1")
    print(f"CPU per chunk: {statistics.median(cpu_us):.0f} us (median of 5 x {LONG_TOKENS} chunks; target 250)")


def cpu_per_chunk_us(server: truth_server.Truth) -> float:
    """Process CPU of one long request, all of it: sending, reading, parsing and the record."""
    gc.collect()
    begun_s = time.process_time()
    record = ask(
        server.url,
        Question(
            "/v1/chat/completions",
            {
                "messages": [],
                "max_tokens": LONG_TOKENS,
                "timings_per_token": True,
                "script": {"ttft_s": 0.2, "gap_s": 0.0005},
            },
        ),
    )
    cpu_s = time.process_time() - begun_s
    assert record.status == "ok" and record.output_tokens == LONG_TOKENS, record
    return cpu_s / len(record.events) * 1e6


def show(what: str, values: list[float], unit: str, target: str) -> None:
    cuts = statistics.quantiles(values, n=100)
    print(
        f"{what}: median {statistics.median(values):.3f} {unit}, p99 {cuts[98]:.3f} {unit}, "
        f"largest {max(values):.3f} {unit}" + (f" ({target})" if target else "")
    )


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:2]))
