"""A server that already runs is measured and left as it was; what it does not tell is unknown."""

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote

import pytest
import requests
from dripping import dripping
from folders import boot, fill, record, soup, text

from llmrepro import (
    bench,
    catalog,
    engines,
    exchange,
    facts,
    jobs,
    machine,
    parameters,
    results,
    run_folder,
    running_server,
    stages,
    workloads,
)
from llmrepro import run as runs
from llmrepro.engines import llama_cpp
from llmrepro.protocols import MeasureFailure
from llmrepro.run_folder import RunError

KEY = 'somebody\'s "own" key-4711'
SMALL = {"workloads.chat.max_tokens": 20, "workloads.prefill.lengths": [32, 64]}


def create(tmp_path, url="http://127.0.0.1:9", **values):
    return runs.create(parameters.checked({"runs_dir": str(tmp_path / "runs"), "server_url": url, **values}))


# ---- which server is meant ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("http://127.0.0.1:8080/v1/", "http://127.0.0.1:8080"),
        ("https://llm.example.org/team/v1", "https://llm.example.org/team"),
        (" http://[::1]:8000/ ", "http://[::1]:8000"),
    ],
)
def test_an_address_is_taken_as_people_write_it(tmp_path, url, address):
    run = create(tmp_path, url)
    assert run.parameters.server_url == address
    run.close()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"url": "127.0.0.1:8080"}, "is no address of a server; write http://127.0.0.1:8080"),
        ({"url": "file:///etc/passwd"}, "is no address of a server"),
        ({"url": "http://127.0.0.1:99999"}, "is no address of a server"),
        ({"url": "http://[::1"}, "is no address of a server"),
        ({"url": "http://me:secret@[::1"}, "holds a password"),
        ({"url": "http://\udcff"}, "is no address of a server"),
        ({"url": "http://me:secret@127.0.0.1:8080"}, "holds a password"),
        ({"url": "http://127.0.0.1:8080/?key=secret"}, "leave . and # out"),
        ({"mode": "published"}, "mode published measures nothing"),
        ({"weights_path": "/tmp/x.gguf"}, "leave weights_path or server_url out"),
        ({"servers": ["default", "mmap"]}, "name in servers the one that it is: default, mmap"),
    ],
)
def test_what_does_not_go_together_is_refused_before_a_folder_is_made(tmp_path, values, said):
    with pytest.raises(RunError, match=said) as found:
        create(tmp_path, **values)
    assert "secret" not in str(found.value) or "?key" in str(found.value)
    assert not (tmp_path / "runs").exists()


def test_one_server_of_the_recipe_is_meant_and_it_is_there_once(tmp_path):
    run = create(tmp_path, overrides={"servers.default.boots": 3})
    plan = jobs.plan(run.recipe, run.parameters)
    assert {j.server for j in plan} == {"default"} and {j.replicate for j in plan} == {0}
    assert {j.server for j in jobs.plan(create(tmp_path, servers=["mmap"]).recipe, run.parameters)} == {"default"}
    run.close()


def test_a_recipe_cannot_name_a_server(tmp_path):
    with pytest.raises(RunError, match="unknown key"):
        create(tmp_path, overrides={"server_url": "http://127.0.0.1:1"})


@pytest.mark.parametrize(
    ("url", "here"),
    [
        ("http://127.0.0.1:1", True),
        ("http://127.9.9.9:1", True),
        ("http://localhost:1", True),
        ("http://[::1]:1", True),
        ("http://192.168.0.7:1", False),
        ("http://localhost.example.org", False),
        ("https://127.0.0.1.example.org", False),
    ],
)
def test_only_loopback_is_this_machine(url, here):
    assert running_server.is_here(url) is here


# ---- who answers ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def listing(status=200, body=None, version=None, **headers):
    """A server that answers GET /v1/models, and /version where it has one."""

    class Handler(BaseHTTPRequestHandler):
        asked: list[tuple[str, str | None]] = []  # noqa: RUF012

        def do_GET(self):
            self.asked.append((self.path, self.headers.get("Authorization")))
            models = self.path == "/v1/models"
            found = body if models else {"version": version} if self.path == "/version" and version else None
            content = json.dumps(found).encode() if not isinstance(found, bytes) else found
            self.send_response(status if models else 200 if found else 404)
            for name, value in {"Content-Type": "application/json", **headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", Handler.asked
    finally:
        server.shutdown()
        server.server_close()


def models(*names):
    return {"object": "list", "data": [{"id": name, "object": "model"} for name in names]}


def who(url, name="vllm"):
    return running_server.identity(url, engines.load(name).versions, {"owner/repo"})


def test_the_model_is_what_the_server_calls_it_and_the_version_what_it_tells(monkeypatch):
    monkeypatch.setenv(running_server.KEY_VARIABLE, KEY)
    with listing(body=models("my-model"), version="0.32.0+cpu") as (url, asked):
        assert who(url) == ("my-model", ["0.32.0+cpu", "0.32.0"])
    assert {key for _, key in asked} == {f"Bearer {KEY}"}
    monkeypatch.delenv(running_server.KEY_VARIABLE)
    with listing(body=models("other", "owner/repo")) as (url, asked):
        assert who(url) == ("owner/repo", [])
    assert {key for _, key in asked} == {None}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"status": 401, "body": {}}, "answers 401: it wants an API key; set LLMREPRO_SERVER_KEY"),
        ({"status": 404, "body": {}}, "answers 404 and names no model"),
        ({"body": {"data": []}}, "names no model"),
        ({"body": b"<html>"}, "names no model"),
        ({"body": {"data": [7]}}, "names no model"),
        ({"body": b"[" * 100_000}, "names no model"),
        (
            {"body": {"data": [{"id": "\ud800"}]}},
            "holds half a character and is no text; serve it under another name",
        ),
        ({"body": models("a", "b")}, r"serves 2 models \(a, b\)"),
        ({"status": 302, "body": {}, "Location": "http://127.0.0.1:1/"}, "leads elsewhere"),
    ],
)
def test_what_cannot_be_measured_is_said_with_what_to_do(answer, said, monkeypatch):
    monkeypatch.delenv(running_server.KEY_VARIABLE, raising=False)
    with listing(**answer) as (url, _), pytest.raises(RunError, match=said):
        who(url)


def test_nobody_there_is_a_sentence(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(RunError, match="nothing answers at .*; start the server"):
            who(f"http://127.0.0.1:{free.getsockname()[1]}")


def test_a_run_that_found_no_server_says_to_start_it_before_running_again(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        run = create(tmp_path, url=f"http://127.0.0.1:{free.getsockname()[1]}")
        with pytest.raises(RunError):
            stages.prepare(run)
    said = run_folder.status(run.path)["next_step"]
    assert said.startswith("start the server and wait until it is ready; then run again")


@pytest.mark.parametrize(
    ("props", "names"),
    [
        ({"build_info": "b11434-0a1b2c3"}, ["b11434-0a1b2c3", "b11434", "11434"]),
        ({"build_info": "b0-unknown"}, []),
        ({}, []),
        (None, []),
    ],
)
def test_llama_cpps_build_has_its_names_or_is_unknown(props, names):
    assert llama_cpp.versions(lambda path: props) == names


# ---- what is known of it --------------------------------------------------------------------------------------


def external(versions=(), url="http://127.0.0.1:8080", **changes):
    told = running_server.told(url, running_server.Identity("my-model", list(versions)))
    left = {
        k: v for k, v in boot(**changes).items() if k not in {"startup", "threads", "command", "metrics", "phases"}
    }
    return left | {"effective": {}, **told}


def measured(tmp_path, one, facts_=None):
    run = create(tmp_path, one["url"])
    run.write_json("machine.json", facts_ or machine.describe(machine.cache_dir()))
    run.write_json("boots/1.json", one)
    for r in range(3):
        for case in run.recipe.workloads[0].cases:
            run.append(record(case, r, tps=100 + r))
    run.set_status("completed", "report")
    run.close()
    return run.path


def condition(path, name):
    (found,) = [c for c in results.compute(path)["conditions"] if c["name"] == name]
    return found["here"], found["relation"]


def test_what_its_api_does_not_tell_is_unknown(tmp_path):
    path = measured(tmp_path, external())
    for name in ("weights_sha256", "engine_version", "servers.default.args"):
        assert condition(path, name) == (None, "unknown_here"), name
    found = facts.read(path)
    for name in ("fixes", "adaptations", "python", "cuda", "engine_commit", "threads", "kv_dtype", "speculation"):
        assert found.shared[name] is None, name
    assert not [r for r in results.compute(path)["metrics"] if r["metric"].startswith(("startup.", "model."))]
    (flag,) = [f for f in results.compute(path)["flags"] if "was running already" in f]
    assert "http://127.0.0.1:8080" in flag and "'my-model'" in flag and "tunnel" in flag


def test_a_version_that_it_tells_is_held_against_the_recipes(tmp_path):
    stated = catalog.load(catalog.DEFAULT).engine.version
    assert condition(measured(tmp_path, external(["b1-x", stated])), "engine_version") == (stated, "equal")
    assert condition(measured(tmp_path, external(["b1-x"])), "engine_version") == ("b1-x", "differs")


def test_this_machines_facts_are_the_servers_only_on_loopback(tmp_path):
    here = machine.describe(machine.cache_dir())
    assert facts.read(measured(tmp_path, external())).shared["cpu_model"] == here["cpu"]["model"]
    url = "https://llm.example.org"
    path = measured(tmp_path, external(url=url), running_server.elsewhere(url, here))
    found = facts.read(path).shared
    for name in ("cpu_model", "cpu_simd", "cpu_cores", "memory_gib", "os", "gpu_name", "gpu_count", "load_1min"):
        assert found[name] is None, name
    page = text(soup(path).main)
    assert "on what machine it runs is not known here" in page and "an unknown processor" in page


def test_the_page_of_such_a_run_has_no_start_and_says_why(tmp_path):
    page = soup(measured(tmp_path, external()))
    assert "It was running already: how it was started is not known." in text(page.main)
    tiles = text(page.find(class_="tiles"))
    assert "start to first token" not in tiles
    assert "measured here, a running server" in tiles and "boot" not in tiles
    assert "a server that already ran does not tell it" in text(page.main)


# ---- a real one -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def llama(prepared, port, context="4096"):
    """A llama.cpp server that this test starts by hand, with a key of its own."""
    env, weights = prepared
    argv = [env.path / "bin/python", llama_cpp.LAUNCHER, "--model", weights, "--alias", "my-model"]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--ctx-size", context, "--parallel", "1"]
    process = subprocess.Popen(
        [*map(str, argv), "--threads", "1", "--metrics", "--no-ui"],
        env={**machine.minimal_environment(), "LLAMA_API_KEY": KEY},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(600):
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"http://127.0.0.1:{port}/health", timeout=5).ok:
                    break
            assert process.poll() is None, "the server ended before it was ready"
            time.sleep(0.1)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def port(monkeypatch):
    monkeypatch.setenv(running_server.KEY_VARIABLE, KEY)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def lines(run):
    return run_folder.read_lines(run.path / "records.jsonl")


@pytest.mark.engine
def test_a_running_llama_cpp_is_measured_through_every_stage_and_left_running(tmp_path, prepared, port):
    with llama(prepared, port) as process:
        run = create(tmp_path, f"http://127.0.0.1:{port}/v1", overrides=SMALL, repeats=2)
        for stage in (stages.card, stages.machine, stages.prepare, stages.measure, stages.results, stages.report):
            stage(run)
        assert process.poll() is None, "it was ended"
        props = requests.get(
            f"http://127.0.0.1:{port}/props", headers={"Authorization": f"Bearer {KEY}"}, timeout=5
        )
        assert props.ok
    assert run_folder.status(run.path)["outcome"] == "completed"
    asked = [r for r in lines(run) if not r["warmup"]]
    assert len(asked) == 2 * 5 + 2 * 2 and {r["status"] for r in asked} == {"ok"}
    assert {r["request"]["model"] for r in asked} == {"my-model"}
    assert {r["output_tokens"] for r in asked if r["workload"] == "chat"} == {20}
    ((_, told),) = runs.boots(run.path).items()
    assert (told["server"], told["replicate"], told["external"], told["model"]) == ("default", 0, True, "my-model")
    assert "startup" not in told and told["effective"]["context_tokens"] == 4096
    assert condition(run.path, "servers.default.context_tokens") == (4096, "differs")
    assert not [n for n in ("environment.json", "weights.json", "install.log") if (run.path / n).exists()]
    spelt = (KEY, json.dumps(KEY)[1:-1], "key-4711")
    for file in (p for p in run.path.rglob("*") if p.is_file()):
        content = file.read_bytes().decode(errors="replace")
        assert not [s for s in spelt if s in content], f"{file.name} holds the key"


@pytest.mark.engine
def test_a_wrong_key_is_said_before_anything_is_recorded(tmp_path, prepared, port, monkeypatch):
    monkeypatch.setenv(running_server.KEY_VARIABLE, "another")
    with llama(prepared, port):
        run = create(tmp_path, f"http://127.0.0.1:{port}")
        with pytest.raises(RunError, match="401: the key is not the server's; set LLMREPRO_SERVER_KEY"):
            workloads.measure(run, None, None)
    assert lines(run) == []
    run.close()


@pytest.mark.engine
def test_its_death_is_recorded_and_it_is_not_started_again_and_a_resumed_run_is_one(tmp_path, prepared, port):
    url = f"http://127.0.0.1:{port}"
    with llama(prepared, port) as process:
        run = create(tmp_path, url, overrides=SMALL, repeats=2)
        append, count = run.append, []

        def dying(one):
            append(one)
            count.append(one)
            if len(count) == 4:
                process.kill()
                process.wait()

        run.append = dying
        with pytest.raises(MeasureFailure, match="died or stopped answering during chat .*: start it, then go on"):
            workloads.measure(run, None, None)
    with pytest.raises(requests.ConnectionError):
        requests.get(f"{url}/health", timeout=2)
    assert [r["status"] for r in lines(run)] == ["ok"] * 4 + ["engine_died"]
    run.append = append
    with llama(prepared, port):
        workloads.measure(run, None, None)
    assert jobs.missing(run) == []
    assert [(n, b["replicate"]) for n, b in runs.boots(run.path).items()] == [(1, 0), (2, 0)]
    speeds = [r for r in results.compute(run.path)["metrics"] if r["metric"] == "ttft_s" and r["case"] is None]
    assert {r["boots"] for r in speeds} == {1}, "a sitting that went on is no replication"
    run.close()


@pytest.mark.engine
def test_cases_that_need_a_start_are_skipped_with_the_reason(tmp_path, prepared, port):
    with llama(prepared, port, context="8192"):
        run = create(tmp_path, f"http://127.0.0.1:{port}", servers=["mmap"], profile="full", repeats=1)
        plan = jobs.plan(run.recipe, run.parameters)
        kinds = {w.id: w.kind for w in run.recipe.workloads}
        assert {kinds[j.workload] for j in plan} == {"restart"}
        workloads.measure(run, None, None)
    records = lines(run)
    assert len(records) == len(plan) and {r["status"] for r in records} == {"skipped"}
    assert all("neither ends nor starts it" in r["error"] for r in records)
    run.close()


def test_a_run_is_not_gone_on_with_on_another_server(tmp_path, monkeypatch):
    run = create(tmp_path)
    fill(run, boots=[external(["0.1"])], outcome="stopped")
    monkeypatch.setattr(running_server, "check", lambda *_: None)
    with listing(body=models("another-model")) as (url, _):
        monkeypatch.setattr(type(run), "parameters", run.parameters.model_copy(update={"server_url": url}))
        with pytest.raises(RunError, match="told model my-model when this run began, and another-model now"):
            workloads.measure(run, None, None)
    run.close()


def keyed(monkeypatch, key):
    monkeypatch.setenv(running_server.KEY_VARIABLE, key)
    return running_server.Running(1, "http://127.0.0.1:1", running_server.key(), None)


def test_a_key_that_a_server_writes_back_is_not_kept(monkeypatch):
    running = keyed(monkeypatch, KEY)
    quoted = json.dumps({"message": f"no {KEY}"})
    said = record(
        text=f"your key is {KEY}",
        reasoning=f"it says {KEY}",
        status="http_error",
        error=f"HTTP 400: {quoted}, in {json.dumps(quoted)}, in {quoted.encode()!r}",
        notes=[f"at /?key={quote(KEY)}"],
        finish_reason=KEY,
        usage={"completion_tokens": 3, "of": [{"whom": KEY}]},
    )
    kept = running.without_key(said)
    assert "key-4711" not in kept.model_dump_json() and kept.text == "your key is <api key>"
    assert kept.usage == {"completion_tokens": 3, "of": [{"whom": "<api key>"}]}
    assert kept.text_sha256 == hashlib.sha256(kept.text.encode()).hexdigest()
    assert KEY not in repr(running)


@pytest.mark.parametrize(
    "key", ["token", "text", "ok", "a", "1", "prompt_tokens", "/v1/chat/completions", "max_tokens"]
)
def test_a_key_that_is_an_ordinary_word_destroys_no_record(monkeypatch, key):
    said = record(text="a token is a text, ok 1", usage={"prompt_tokens": 11, "max_tokens": 1})
    assert keyed(monkeypatch, key).without_key(said) == said


@pytest.mark.parametrize("key", ["of-two\nlines", " spaced-out ", "schlüssel-4711"])
def test_a_key_that_no_header_carries_is_refused_without_being_told(monkeypatch, key):
    monkeypatch.setenv(running_server.KEY_VARIABLE, key)
    with (
        listing(body=models("a")) as (url, _),
        pytest.raises(RunError, match="which no HTTP header carries") as found,
    ):
        who(url)
    assert key.strip() not in str(found.value)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"body": models(f"served to {KEY}")}, "holds the API key, and would be written down"),
        ({"body": models(f"a {KEY}", f"b {KEY}")}, "serves 2 models .a <api key>, b <api key>."),
        ({"status": 302, "body": {}, "Location": f"/?key={quote(KEY)}"}, "leads elsewhere ./.key=<api key>."),
    ],
)
def test_a_key_in_what_a_server_says_of_itself_is_told_nowhere(monkeypatch, answer, said):
    monkeypatch.setenv(running_server.KEY_VARIABLE, KEY)
    with listing(**answer) as (url, _), pytest.raises(RunError, match=said) as found:
        who(url)
    assert "4711" not in str(found.value)


def test_a_key_in_a_version_and_in_what_is_observed_is_not_kept(monkeypatch):
    running = keyed(monkeypatch, KEY)
    with listing(body=models("m"), version=f"0.32.0 for {KEY}") as (url, _):
        assert who(url) == ("m", ["0.32.0 for <api key>"])
        running.url = url
        assert bench.call(running, "/version") == {"version": "0.32.0 for <api key>"}
    with listing(body=f"# {KEY}".encode(), **{"Content-Type": "text/plain"}) as (running.url, _):
        assert bench.call(running, "/v1/models") == "# <api key>"


def test_what_no_run_folder_can_hold_is_not_observed():
    running = running_server.Running(1, "", None, None)
    body = b'{"half": "\\ud800", "large": 1e400, "none": NaN, "n": 7}'
    with listing(body=body) as (running.url, _):
        found = bench.call(running, "/v1/models")
    assert found == {"half": "?", "large": None, "none": None, "n": 7}
    with listing(body=b"[" * 100_000) as (running.url, _):
        assert bench.call(running, "/v1/models") is None


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: ",
    ],
    ids=["body", "headers"],
)
def test_an_answer_that_drips_is_waited_for_only_so_long(monkeypatch, head):
    monkeypatch.setattr(exchange, "WHOLE_S", 0.5)
    running = running_server.Running(1, "", None, None)
    with dripping(head, b" ") as running.url:
        with pytest.raises(RunError, match="/v1/models did not end its answer within 0.5 s; it must be a server"):
            who(running.url)
        assert bench.call(running, "/props") is None


def test_an_answer_that_is_too_large_is_not_read_to_its_end(monkeypatch):
    monkeypatch.setattr(exchange, "MOST_BYTES", 1 << 20)
    running = running_server.Running(1, "", None, None)
    with listing(body=b" " * (2 << 20)) as (running.url, _):
        with pytest.raises(RunError, match="/v1/models answers with more than 1 MiB"):
            who(running.url)
        assert bench.call(running, "/v1/models") is None


def test_no_variable_is_no_key(monkeypatch):
    monkeypatch.setenv(running_server.KEY_VARIABLE, "")
    assert running_server.key() is None
    assert running_server.KEY_VARIABLE in os.environ
