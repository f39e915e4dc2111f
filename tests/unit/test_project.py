"""The project agrees with itself: versions, public names, import rules, what an import costs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import nbdist

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
README = (ROOT / "README.md").read_text(encoding="utf-8")

PUBLIC = """
    Cluster __version__ account accumulate autocast clip_gradients closed_form cluster compare ddp estimate
    forecast fsdp grad_scaler load load_ipython_extension loader log mean_over_ranks memory_snapshot profile
    recommend replicas_equal save span start track unload_ipython_extension
""".split()


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout.strip()


# ---- names


def test_public_names_are_frozen():
    assert sorted(nbdist.__all__) == PUBLIC


def test_every_public_name_can_be_had():
    for name in nbdist.__all__:
        assert getattr(nbdist, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'unknown'"):
        nbdist.unknown


def test_every_module_says_what_it_offers():
    for path in (ROOT / "nbdist").rglob("*.py"):
        names = {
            target.id
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        empty = not path.read_text(encoding="utf-8").strip() or path.name == "__init__.py"
        assert empty or "__all__" in names, f"{path.relative_to(ROOT)} has no __all__"


def test_no_module_is_too_long():
    lengths = {
        str(p.relative_to(ROOT)): p.read_text(encoding="utf-8").count("\n") for p in (ROOT / "nbdist").rglob("*.py")
    }
    assert not {path: n for path, n in lengths.items() if n > 520}


# ---- imports


def test_importing_nbdist_imports_no_torch():
    assert python("import sys, nbdist; print([m for m in sys.modules if m.split('.')[0] == 'torch'])") == "[]"


def test_loading_the_magics_imports_no_torch():
    code = "import sys, nbdist.magics; print([m for m in sys.modules if m.split('.')[0] in ('torch', 'matplotlib')])"
    assert python(code) == "[]"


def module_imports(path: Path) -> set[str]:
    """Top-level names a module imports while it is imported itself."""
    found: set[str] = set()

    def visit(nodes: list[ast.stmt]) -> None:
        for node in nodes:
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module or "")
            elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
                visit(node.body)
                visit(node.orelse)
            elif isinstance(node, ast.Try | ast.With):
                visit(node.body)

    visit(ast.parse(path.read_text(encoding="utf-8")).body)
    return found


@pytest.mark.parametrize(
    ("folder", "never"),
    [
        ("notebook", "torch"),
        ("wire", "torch"),
        ("wire", "IPython"),
        ("worker", "nbdist.notebook"),
        ("train", "nbdist.notebook"),
    ],
)
def test_folders_keep_to_their_side(folder, never):
    for path in (ROOT / "nbdist" / folder).rglob("*.py"):
        wrong = {name for name in module_imports(path) if name == never or name.startswith(never + ".")}
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


# ---- versions


def bound(requirement: str) -> str:
    """Lower bound of one of our requirements."""
    every = PROJECT["dependencies"] + [r for extra in PROJECT["optional-dependencies"].values() for r in extra]
    return next(m[1] for r in every if (m := re.fullmatch(rf"{re.escape(requirement)}>=([\d.]+)", r)))


def test_the_version_stands_in_one_place_per_file():
    assert PROJECT["version"] == nbdist.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "## [Unreleased]" in changelog or f"## [{nbdist.__version__}]" in changelog


def test_torch_is_the_same_everywhere():
    oldest = bound("torch")
    image = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    tag = re.search(r"^ARG TORCH_IMAGE=(pytorch/pytorch:([\d.]+)-cuda[\d.]+-cudnn9-runtime)$", image, re.MULTILINE)
    assert tag is not None
    assert tag[2].startswith(oldest), "the image holds the oldest torch that is supported"
    assert tag[1] in README
    assert f"torch>={oldest}" in (ROOT / "environment.yml").read_text(encoding="utf-8")
    assert f"PyTorch {oldest}" in README


def test_python_is_the_same_everywhere():
    oldest = PROJECT["requires-python"].removeprefix(">=")
    assert f"python>={oldest}" in (ROOT / "environment.yml").read_text(encoding="utf-8")
    assert f"Python {oldest}" in README
    assert f"Programming Language :: Python :: {oldest}" in PROJECT["classifiers"]
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    assert tools["ruff"]["target-version"] == "py" + oldest.replace(".", "")
    assert tools["mypy"]["python_version"] == oldest


def test_the_commands_of_the_readme_are_those_of_the_gate():
    gate = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert ".venv/bin/pytest" in README and '"$venv/bin/pytest"' in gate
    for extra in re.findall(r"-e '\.\[([\w,]+)\]'", README):
        assert set(extra.split(",")) <= set(PROJECT["optional-dependencies"])


def test_the_readme_names_files_that_exist():
    for name in re.findall(r"\]\((?!https?:|#)([^)#]+)", README):
        assert (ROOT / name).exists(), name


def test_nothing_names_the_place_where_it_was_made():
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if files.returncode:
        pytest.skip("not a git checkout")
    pattern = re.compile(r"/(?:root/\.|work/main/|opt/pypi)")
    for name in filter(None, files.stdout.split("\0")):
        path = ROOT / name
        if path.suffix in {".png", ".ipynb"} or not path.is_file():
            continue
        found = pattern.search(path.read_text(encoding="utf-8", errors="replace"))
        assert not found, f"{name}: {found[0]}"


def test_the_license_is_there():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert text.startswith("BSD 3-Clause License")
    assert "nbdist contributors" in text
    assert PROJECT["license"] == "BSD-3-Clause"


# ---- dependencies

DISTRIBUTIONS = {"IPython": "ipython", "pynvml": "nvidia-ml-py", "zmq": "pyzmq"}
COME_ALONG = {"PIL": "matplotlib", "traitlets": "ipython"}  # what always brings them
ON_REQUEST = {"webdataset"}  # only where a user passes one of its datasets


def test_what_is_imported_is_declared():
    declared = {re.split(r"[<>=\[]", d)[0] for d in PROJECT["dependencies"]}
    lab = {re.split(r"[<>=\[]", d)[0] for d in PROJECT["optional-dependencies"]["lab"]}
    for path in (ROOT / "nbdist").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom) and not node.level
                else []
            )
            for top in {name.partition(".")[0] for name in names}:
                if top in sys.stdlib_module_names or top == "nbdist" or top in ON_REQUEST:
                    continue
                wanted = DISTRIBUTIONS.get(top) or COME_ALONG.get(top) or top
                allowed = declared | lab if path.name == "cli.py" else declared
                assert wanted in allowed, f"{path.relative_to(ROOT)} imports {top}, which pyproject.toml does not name"
