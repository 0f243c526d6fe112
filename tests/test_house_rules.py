"""The house rules that a machine can check: imports go one way, names are used once, nothing is left open."""

import ast
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.mutants import MUTANTS
from tests.mutants.places import Code, changes

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gemini", "sharding", "optim")

# A lower layer never imports a higher one. Single files in gemini/ itself (errors.py) stand below all layers.
LAYERS = (
    "placement",
    "memory",
    "monitor",
    "ranks",
    "runtime",
    "replan",
    "access",
    "building",
    "model",
    "optimizer",
    "checkpoint",
    "tracing",
    "engine",
    "deepspeed",
    "integrations",
    "cli",
)
NAMED_TWICE = ("Accelerator", "Trainer")  # classes whose name another has: each is a name of two libraries
BANNED_NAMES = {"utils.py", "util.py", "common.py", "base.py", "helpers.py", "misc.py"}
STREAM_WORDS = re.compile(
    r"\bsynchronize\b|\.(record|query|stream|elapsed_time)\(|\b(Stream|Event|ExternalStream|StreamContext)\b"
    r"|\b(record|wait)_(event|stream)\b|\b(current|default|set)_stream\b|\bimport\b.*\bstream\b"
)
OPEN_WORDS = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
MACHINE_PATHS = re.compile(r"(?<![\w.])/(work|farm|root|home|Users|opt/wheels)/")


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def written_files() -> Iterator[Path]:
    """Everything that people write here, without what tools put beside it."""
    for folder, folders, files in os.walk(ROOT):
        hidden = {name for name in folders if name.startswith(".") and name != ".ci"}
        built = {"build", "dist", "site"} if folder == str(ROOT) else {"CMakeFiles"}
        folders[:] = sorted({*folders} - hidden - built - {name for name in folders if name.endswith(".egg-info")})
        for name in sorted(files):
            text = Path(name).suffix in {".py", ".md", ".toml", ".txt", ".cpp", ".h", ".cu", ".sh"}
            if name not in {"CMakeCache.txt", "CMakeInit.txt"} and (text or name in {"Makefile", "run"}):
                yield Path(folder, name)


def imported_names(text: str, package: str) -> Iterator[str]:
    """Dotted names that a module imports (under TYPE_CHECKING and in functions too), relative ones resolved.

    `package` is the package the module lives in. `from a import b` yields `a.b`: b may be a module.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def layer(name: str) -> int | None:
    """Position of a gemini module, higher imports lower; None for `gemini` itself: it re-exports."""
    parts = name.split(".")
    if len(parts) == 1:
        return None
    if parts[1] == "settings":  # they name policies and sizes, and plans are made from them
        return LAYERS.index("placement")
    return LAYERS.index(parts[1]) if parts[1] in LAYERS else -1


def wrong_imports(package: str, text: str) -> list[str]:
    """What the module `text`, which lives in `package`, must not import."""
    wrong = []
    for name in imported_names(text, package):
        top = name.split(".")[0]
        if package.split(".")[0] != "gemini":
            if top in PACKAGES and top != package.split(".")[0]:
                wrong.append(name)
        elif top == "gemini":
            own = layer(package)
            theirs = layer(name)
            # `from gemini import ShardedModel`: neither a layer nor a single file, so a name of the root
            is_file = (ROOT / (name.replace(".", "/") + ".py")).exists()
            from_root = name.count(".") == 1 and theirs == -1 and not is_file
            if theirs is None or from_root or (own is not None and theirs > own):
                wrong.append(name)
    return wrong


def importers() -> Iterator[tuple[Path, str]]:
    for path in sources(*PACKAGES):
        package = ".".join(path.relative_to(ROOT).parent.parts)
        if path.relative_to(ROOT).as_posix() not in {"gemini/__init__.py", "gemini/__main__.py"}:
            # a single file directly in gemini/ stands below all layers, but for settings.py: see `layer`
            yield path, f"gemini.{path.stem}" if package == "gemini" else package


def test_imports_go_in_one_direction() -> None:
    wrong = {
        str(path.relative_to(ROOT)): names
        for path, package in importers()
        if (names := wrong_imports(package, path.read_text()))
    }
    assert not wrong, f"imports against the layering: {wrong}"


def imports_of_modules() -> dict[str, set[str]]:
    """The modules of gemini that each of its modules imports, for types and in functions too; packages left out."""
    known = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sources("gemini")}
    of = {name: set(imported_names(path.read_text(), name.rpartition(".")[0])) for name, path in known.items()}
    parents = {name: {each if each in known else each.rpartition(".")[0] for each in of[name]} for name in known}
    return {name: found & known.keys() for name, found in parents.items()}


def import_circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """The sets of modules that import one another, directly or through others."""
    below: dict[str, set[str]] = {}
    for name in imports:
        found, waiting = set[str](), [name]
        while waiting:
            waiting += new if (new := imports[waiting.pop()] - found) else ()
            found |= new
        below[name] = found
    circles = [{other for other in below[name] if name in below[other]} for name in imports]
    return [circle for number, circle in enumerate(circles) if circle and circle not in circles[:number]]


def test_modules_import_each_other_in_no_circle() -> None:
    """Who reads one file of a circle has to read all of it, whatever the imports are for."""
    (trainer,) = import_circles(imports_of_modules())
    assert {name.rpartition(".")[2] for name in trainer} == {"trainer", "hooks", "checkpoints"}, "a trainer and hooks"


def test_the_rule_about_circles_sees_what_it_should() -> None:
    assert import_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [{"b", "c"}]
    assert import_circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []


def test_no_file_speaks_of_itself_as_of_another() -> None:
    """Such a comment has moved with its code, and sends its reader where he is."""
    found = [
        f"{path.relative_to(ROOT)}:{number} {line.strip()}"
        for path in sources(*PACKAGES)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if not path.stem.startswith("__") and re.search(rf"(?<![\w/.]){path.name}\b", line)
    ]
    assert not found, "\n".join(found)


def test_errors_imports_nothing_of_gemini() -> None:
    path = ROOT / "gemini" / "errors.py"
    ours = [n for n in imported_names(path.read_text(), "gemini") if n.split(".")[0] in PACKAGES]
    assert not ours


def test_placement_knows_numbers_and_optim_knows_no_ranks() -> None:
    def users(folder: str, *banned: str) -> list[str]:
        return [
            f"{path.relative_to(ROOT)} imports {name}"
            for path in sources(folder)
            for name in imported_names(path.read_text(), folder.replace("/", "."))
            if any(name == b or name.startswith(b + ".") for b in banned)
        ]

    assert not users("gemini/placement", "torch")
    assert not users("optim", "torch.distributed")


@pytest.mark.parametrize(
    ("package", "text", "is_wrong"),
    [
        ("gemini.runtime", "from gemini.memory.slot import Slot", False),
        ("gemini.runtime", "from gemini.model import fetch", True),
        ("gemini.runtime", "from ..model import hooks", True),
        ("gemini.runtime", "from . import chunk", False),
        ("gemini.memory", "def f():\n    import gemini.engine.config", True),
        ("gemini.memory", "from gemini import ShardedModel", True),
        ("gemini.memory", "from gemini.errors import BudgetError", False),
        ("gemini.placement", "if TYPE_CHECKING:\n    from gemini.memory import Tier", True),
        ("gemini.runtime", "import sharding, optim", False),
        ("gemini.single", "from gemini.placement import plan", True),
        ("sharding", "import optim", True),
        ("optim", "from gemini.errors import ConfigError", True),
        ("optim.kernels", "from optim.adam import adam_update_", False),
    ],
)
def test_the_import_rule_itself_sees_what_it_should(package: str, text: str, is_wrong: bool) -> None:
    assert bool(wrong_imports(package, text)) == is_wrong


def test_no_further_class_has_the_name_of_another() -> None:
    trees = [ast.parse(path.read_text()) for path in sources(*PACKAGES)]
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    twice = {name for name, count in names.items() if count > 1}
    assert twice <= {*NAMED_TWICE}, "a reader who searches for a name should find one class"
    assert not {*NAMED_TWICE} - twice, "these are named once by now: take them off"


def test_how_gradients_accumulate_is_chosen_once() -> None:
    """The manager tells the books whether there is one rank; no part of gradients asks how many ranks there are."""
    asking = re.compile(r"world_size (==|!=|>|>=|<|<=) \d")
    parts = {"GradientBooks", "GradientRules", "PlaceRules", "Reductions", "Arrivals", "GradPlaces", "GradStore"}
    parts |= {"Leftovers", "keep_unsynced", "reduce_unsynced"}
    nodes: list[Any] = [node for path in sources("gemini") for node in ast.parse(path.read_text()).body]
    texts = {node.name: ast.unparse(node) for node in nodes if getattr(node, "name", None) in parts}
    assert texts.keys() == parts
    assert not [part for part, text in texts.items() if asking.search(text)]


def test_only_one_file_names_streams_and_events_or_waits_for_a_device() -> None:
    """Whoever needs a copy to be done waits for its region, see "Transfers and tickets" in docs/step.md."""
    found = [
        f"{path.relative_to(ROOT)}:{number} {line.strip()}"
        for path in sources(*PACKAGES)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if path != ROOT / "gemini/memory/transfer.py" and STREAM_WORDS.search(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("torch.cuda.synchronize()", True),
        ("wait = torch.cuda.synchronize", True),
        ("with torch.cuda.stream(s):", True),
        ("s.wait_stream(t)", True),
        ("torch.accelerator.set_stream(s)", True),
        ("e.record()", True),
        ("e.query()", True),
        ("s = torch.cuda.Stream(device)", True),
        ("from torch.cuda import Stream as S", True),
        ("from torch.cuda import stream as within", True),
        ("    Event as Mark,", True),
        ("make = getattr(torch.cuda, 'Event')", True),
        ("work.wait()", False),
        ("self.recorder.record_peaks()", False),
        ("# events that listeners see", False),
    ],
)
def test_the_rule_about_streams_sees_what_it_should(line: str, is_found: bool) -> None:
    assert bool(STREAM_WORDS.search(line)) == is_found


FACTORIES = "empty empty_strided zeros ones full tensor as_tensor asarray scalar_tensor arange linspace logspace eye"
FACTORIES += " rand randn randint randperm normal tril_indices triu_indices sparse_coo_tensor"


def test_every_new_tensor_has_its_device() -> None:
    """torch.set_default_device("cuda") is the user's, for the user's tensors."""
    made = {f"torch.{name}" for name in FACTORIES.split()}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"
        for path in sources(*PACKAGES)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in made
        if "device" not in {keyword.arg for keyword in node.keywords}
    ]
    assert not found, "\n".join(found)


def test_every_warning_names_the_users_line() -> None:
    """A fixed `stacklevel` is right for one way to a warning: `gemini/log.py` finds the line whatever the way is."""
    warning = re.compile(r"warnings\.warn\(|stacklevel=")
    found = {path.relative_to(ROOT).as_posix() for path in sources("gemini") if warning.search(path.read_text())}
    assert found == {"gemini/log.py"}


def test_no_file_is_called_utils() -> None:
    assert not [str(p.relative_to(ROOT)) for p in sources(*PACKAGES) if p.name in BANNED_NAMES]


def test_nothing_names_a_machine_or_is_left_open() -> None:
    found = []
    for path in written_files():
        text = path.read_text(errors="replace")
        for match in (*MACHINE_PATHS.finditer(text), *OPEN_WORDS.finditer(text)):
            if path != Path(__file__).resolve():
                found.append(f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1} {match.group()}")
    assert not found, "\n".join(found)


def test_no_file_has_two_versions_of_a_merge() -> None:
    marks = ("<" * 7 + " ", ">" * 7 + " ")
    lines = ((path, line) for path in written_files() for line in path.read_text(errors="replace").splitlines())
    assert not {f"{path.relative_to(ROOT)}: {line}" for path, line in lines if line.startswith(marks)}


def test_nothing_that_tools_make_is_committed() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    tracked = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    done = subprocess.run(tracked, cwd=ROOT, capture_output=True, text=True, check=True)
    assert not done.stdout, f"git rm --cached these, which .gitignore names:\n{done.stdout}"


def test_every_mutant_changes_one_place() -> None:
    """Code moves on; `make mutants` takes minutes to find out."""
    code = Code(ROOT)
    found = {mutant.name: code.places(mutant) for mutant in MUTANTS}
    stale = [mutant for mutant in MUTANTS if len(found[mutant.name]) != 1]
    told = [f"{m.name}: {len(found[m.name])} times in {m.where}; see {code.elsewhere(m)}" for m in stale]
    assert not stale, "\n".join(told)
    for places in found.values():
        ast.parse(places[0].mutated)


@pytest.mark.parametrize(
    ("text", "old", "new", "expected"),
    [
        ("x = f(a,\n  b)  # so", "f(a, b)", "g(a)", "x = g(a)  # so"),
        ("x = not (a and b)", "a and b", "a or b", "x = not ((a or b))"),
        ("if a:\n    b()\nelif (c  # so\n):\n    d()", "if c:", "if e:", "if a:\n    b()\nelif e:\n    d()"),
        ("for a in b: c()", "for a in b:", "while b:", "while b: c()"),
        ("try:\n    a()\nexcept B:\n    c()", "except B:", "except D:", "try:\n    a()\nexcept D:\n    c()"),
        ("@a\ndef b(c): d", "@a\ndef b(c):", "def b(c):", "def b(c): d"),
        ("if a:\n    # so\n    b()\n\n    c()", "b()\nc()", "c()\nb()", "if a:\n    # so\n    c()\n    b()"),
        ("if a:\n    b()", "b()", "", "if a:\n    pass"),
        ("é = a; b = f(c for c in d)", "(c for c in d)", "d", "é = a; b = f(d)"),
        ("a(b)\na(b)", "a(b)", "c", None),
        ("x = f'{a(b)}'", "a(b)", "c", None),
    ],
)
def test_a_mutant_is_found_by_its_syntax(text: str, old: str, new: str, expected: str | None) -> None:
    source = text.encode()
    found = [
        source[:start] + its.encode() + source[end:] for start, end, its in changes(source, ast.parse(source), old, new)
    ]
    assert len(found) != 1 if expected is None else [each.decode() for each in found] == [expected]


def test_every_mutant_names_a_test_that_is_there() -> None:
    missing = []
    for mutant in MUTANTS:
        path, _, name = mutant.test.partition("::")
        text = (ROOT / path).read_text() if (ROOT / path).exists() else ""
        if not re.search(rf"^def {name.partition('[')[0]}\(" if name else "^def test_", text, re.M):
            missing.append(mutant.test)
    assert not missing
