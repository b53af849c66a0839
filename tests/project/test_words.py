"""The words: docstrings open with their subject, public ones say all, and files that are named exist."""

import ast
import functools
import inspect
import io
import pathlib
import re
import tokenize

import pytest

import benchmarks
import cutjax

PACKAGES = [pathlib.Path(package.__file__).parent for package in (cutjax, benchmarks)]
TESTS = pathlib.Path(__file__).parents[1]
REPOSITORY = pathlib.Path(__file__).parents[2]
DOCUMENTS = [*sorted((REPOSITORY / "docs").glob("*.md")), *sorted(REPOSITORY.glob("*.md"))]
# Riddles: who reads must find out what is spoken of. Better: Returns, Computes, True if, an imperative, a noun phrase.
_QUESTION = r"(what|whether|how|which|who|whose|why|where|when)\b"
RIDDLE = re.compile(
    rf"{_QUESTION}|(Returns|Yields|Says|Computes|Notes)( \w+)? {_QUESTION}|Returns (it|them|all of)\b|(Of|That|Those)\b"
    r"|The same\b|((The|An?|Each|Another) )?(?!user)\w+'s\b",
    re.IGNORECASE,
)
# Public names that are modules.
PLAIN = {"checkpoint_policies", "formats"}
# A file anywhere in prose: of the sources, or recorded. Not a part of a name ("-h200.json"), nor a pattern ("*.json").
NAMED = re.compile(
    r"(?<![\w/.*{<>-])((?:[\w.-]+/)*\w[\w.-]*\.(?:py|cuh|cc|h|json|jsonl|md|png|svg|yml|toml|sh))(?![\w(/*]|\.\w)"
)
# In documents, in code quotes: a file and what it defines, by either way to write it, and the files of a folder.
DEFINED = re.compile(r"`([\w./]*\w\.py): ([\w.]+)`")
DEFINED_IN = re.compile(r"`([\w.]+)` (?:in|of) `([\w./]*\w\.py)`")
OF_FOLDER = re.compile(r"`([\w/]+/)`: (`[\w.]+\.\w+`(?:, `[\w.]+\.\w+`)*)")
SOURCES = ("cutjax", "ffi", "benchmarks", "tests", "examples", "docs", ".github")
# What commands write, files of a user's own and of others, as they are named in prose; "X.json" is any.
ELSEWHERE = re.compile(
    r"(build/|[A-Z]+\.)|(configs|cutjax-report|tuned|stress)\.json|(loss|transformer|tuning)\.png|floors\.svg|cuda\.h"
    r"|pictures/|tutorial\.md"
    r"|(program|block)\.py"
)
POLICIES = ("dots_saveable", "dots_with_no_batch_dims_saveable")


@functools.cache
def parsed(path):
    """The syntax tree of a file."""
    return ast.parse(path.read_text())


def docstrings(path):
    """Yields name, line and docstring of everything in a file that has one."""
    for node in ast.walk(parsed(path)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and (text := ast.get_docstring(node)):
            yield getattr(node, "name", path.stem), getattr(node, "lineno", 1), text


def test_docstrings_open_with_their_subject():
    """Those of the packages, and of what tests share; a test's may say what holds."""
    sources = [path for package in PACKAGES for path in sorted(package.rglob("*.py"))]
    helpers = [path for path in sorted(TESTS.rglob("*.py")) if not path.stem.startswith("test_")]
    found = [
        f"{path}:{line} {name}: {text.splitlines()[0]}"
        for path in [*sources, *helpers]
        for name, line, text in docstrings(path)
        if RIDDLE.match(text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "riddle"),
    [
        ("Returns what runs for a product.", True),
        ("Returns about how many registers a thread takes.", True),
        ("Returns all of it.", True),
        ("Of a and b.", True),
        ("Says which operands are gathered.", True),
        ("The same from now on.", True),
        ("Returns the reasons why kernels cannot be compiled.", False),
        ("Returns, for each accumulator, True if the derivative reads its value.", False),
        ("Chooses a kernel or XLA for a product, or an error.", False),
    ],
)
def test_riddles(text, riddle):
    assert bool(RIDDLE.match(text)) == riddle


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_modules_say_what_they_own(package):
    """Those of a folder say in its __init__ what lives there."""
    assert not [str(path) for path in package.rglob("*.py") if not ast.get_docstring(parsed(path))]


@pytest.mark.parametrize("root", ["ffi", "tests"])
def test_folders_say_what_lives_there(root):
    """Where no __init__ can, the table of README.md does: a row for each folder that has files."""
    root = REPOSITORY / root
    rows = re.findall(r"^\| `([\w/]+)/` \| [`\w]", (root / "README.md").read_text(), re.MULTILINE)
    sources = [path for suffix in ("py", "cuh", "cc", "h") for path in root.rglob(f"*.{suffix}")]
    assert sorted(rows) == sorted({path.parent.relative_to(root).as_posix() for path in sources} - {"."})


@pytest.mark.parametrize("name", sorted(set(cutjax.__all__) - PLAIN))
def test_public_names_are_documented(name):
    """Functions have all of Args, if they take any, and Returns; classes, which are records, have Attributes."""
    public = getattr(cutjax, name)
    text, parameters = inspect.getdoc(public) or "", inspect.signature(public).parameters
    sections = ["Attributes:"] if inspect.isclass(public) else ["Returns:", *(["Args:"] if parameters else [])]
    assert not [section for section in sections if f"\n{section}\n" not in text]
    assert not [x for x in parameters if not re.search(rf"\b{x}\b", text)]


@pytest.mark.parametrize("name", POLICIES)
def test_policies_are_documented(name):
    text = inspect.getdoc(getattr(cutjax.checkpoint_policies, name)) or ""
    assert not [section for section in ("Args:", "Returns:", "Examples:") if f"\n{section}" not in text]


@functools.cache
def files():
    """Returns what may be named: every file of the sources, and those beside them."""
    found = [path for folder in SOURCES for path in (REPOSITORY / folder).rglob("*") if path.is_file()]
    return [*found, *(path for path in REPOSITORY.iterdir() if path.is_file())]


def named(name):
    """Returns the files whose path ends in a name."""
    return [path for path in files() if path.as_posix().endswith(f"/{name}")]


def prose():
    """Yields documents, and docstrings and comments of sources that name files, each with the place where it stands."""
    for path in DOCUMENTS:
        yield path.name, path.read_text()
    for path in files():
        if path.suffix == ".py" and path != pathlib.Path(__file__):
            text = path.read_text()
            if NAMED.search(text):
                yield from ((f"{path}:{line}", text) for _, line, text in docstrings(path))
            # To tell a comment from a string takes long.
            if any(NAMED.search(line.partition("#")[2]) for line in text.splitlines()):
                for token in tokenize.generate_tokens(io.StringIO(text).readline):
                    if token.type == tokenize.COMMENT:
                        yield f"{path}:{token.start[0]}", token.string
        elif path.suffix in (".cuh", ".cc", ".h"):
            for line, text in enumerate(path.read_text().splitlines(), 1):
                yield f"{path}:{line}", text.partition("//")[2]


def test_files_that_are_named_exist():
    """In documents, docstrings and comments, with folders or without."""
    known = {"/".join(path.relative_to(REPOSITORY).parts[i:]) for path in files() for i in range(len(path.parts))}
    found = [
        f"{place}: {name}"
        for place, text in prose()
        for name in NAMED.findall(text)
        if name.removeprefix("../") not in known and not ELSEWHERE.match(name)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_what_exists(document):
    """What ``file: name`` or ``name in file`` says is defined there, and what ``folder/:`` lists is in that folder."""
    text, wrong = document.read_text(), []
    for name, defined in [*DEFINED.findall(text), *((name, defined) for defined, name in DEFINED_IN.findall(text))]:
        if not any(defines(path, defined.split(".")) for path in named(name)):
            wrong.append(f"{name}: {defined}")
    for folder, names in OF_FOLDER.findall(text):
        wrong += [f"{folder}{name}" for name in re.findall(r"[\w.]+", names) if not named(f"{folder}{name}")]
    assert not wrong


def test_what_contributors_touch_exists():
    """Of CONTRIBUTING's table, each file and folder, and each name: in the file of Python that is said next."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| (an? [^|]+) \|[^|]*\| ([^|]+) \| \d", text, re.MULTILINE)
    wrong, names = [], []
    for row, touched in rows:
        assert not names, row
        for quoted in re.findall(r"`([^`]+)`", touched):
            if re.fullmatch(r"\w+", quoted):
                names.append(quoted)
                continue
            path = REPOSITORY / quoted.removeprefix("python ")
            wrong += [quoted] * (not path.exists() and not quoted.startswith("cutjax."))
            if path.suffix == ".py":
                wrong += [f"{quoted}: {name}" for name in names if not defines(path, [name])]
                names = []
    assert len(rows) > 12
    assert not wrong


def test_every_file_of_the_kernels_is_in_the_map():
    """The table of docs/how-a-call-travels.md has a place for each."""
    text = (REPOSITORY / "docs" / "how-a-call-travels.md").read_text()
    device = REPOSITORY / "ffi" / "device"
    assert not [x for path in device.rglob("*.cuh") if f"`{(x := path.relative_to(device).as_posix())}`" not in text]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("as kernel.py says, and sm90/text.py.", ["kernel.py", "sm90/text.py"]),
        ("(benchmarks/results/x-h200.json, -h200x2.json)", ["benchmarks/results/x-h200.json"]),
        ("`ffi/device/*.cuh`, jax.numpy, f.h(x), *.json", []),
    ],
)
def test_names_of_files(text, found):
    assert NAMED.findall(text) == found


def names_of(node):
    """The names that a statement defines: of a function or a class, or those that it assigns to."""
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    assigned = [x.id for target in targets if target for x in ast.walk(target) if isinstance(x, ast.Name)]
    return [getattr(node, "name", None), *assigned]


def defines(path, names):
    """True if a Python file defines a name, or a dotted name in classes."""
    body = parsed(path).body
    for name in names:
        nodes = [node for node in body if name in names_of(node)]
        if not nodes:
            return False
        body = getattr(nodes[0], "body", [])
    return True
