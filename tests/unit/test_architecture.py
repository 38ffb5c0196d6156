"""The house: which package may import what, and what never stands in any of them."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PACKAGES = ("p2p_trainer", "peers", "dht_config")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
each_module = pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything that is imported anywhere in a module, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide which package they are from"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def tops(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported(tree_of(path))}


def test_all_three_packages_are_looked_at() -> None:
    assert {package_of(path) for path in MODULES} == set(PACKAGES)
    assert len(MODULES) > 30


@each_module
def test_imports_go_from_p2p_trainer_to_peers_to_dht_config_only(path: Path) -> None:
    allowed = set(PACKAGES[PACKAGES.index(package_of(path)) :])
    assert tops(path) & set(PACKAGES) <= allowed


MAY_BE_IMPORTED_BY = {
    "rehearsal": {"cli.py", "reporting.py", "rehearsal", "simulation"},
    "simulation": {"cli.py", "simulation"},
}
"""What of ``p2p_trainer`` may use these: a peer that trains needs neither. ``reporting`` prints a scene's mistakes."""


@pytest.mark.parametrize("path", sorted((ROOT / "p2p_trainer").rglob("*.py")), ids=lambda path: path.name)
def test_a_peer_needs_no_rehearsal(path: Path) -> None:
    place = path.relative_to(ROOT / "p2p_trainer").parts[0]
    used = {name.split(".")[1] for name in imported(tree_of(path)) if name.startswith("p2p_trainer.")}
    for package, users in MAY_BE_IMPORTED_BY.items():
        assert package not in used or place in users


@each_module
def test_nothing_shipped_imports_tests(path: Path) -> None:
    assert not tops(path) & {"tests", "pytest", "hypothesis"}


@pytest.mark.parametrize("path", sorted((ROOT / "dht_config").rglob("*.py")), ids=lambda path: path.name)
def test_dht_config_knows_no_tensors(path: Path) -> None:
    assert not tops(path) & {"torch", "numpy", "safetensors", "transformers", "sklearn", "pynvml", "typer", "rich"}


@pytest.mark.parametrize("path", sorted((ROOT / "peers").rglob("*.py")), ids=lambda path: path.name)
def test_peers_knows_no_models_gpus_or_command_line(path: Path) -> None:
    forbidden = {"transformers", "tokenizers", "sklearn", "safetensors", "typer", "click", "rich", "pynvml", "psutil"}
    assert not tops(path) & forbidden
    names = set(imported(tree_of(path)))
    assert not any(name.startswith(("torch.cuda", "torch.nn", "torch.optim")) for name in names)
    used = {ast.unparse(node) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)}
    assert not any(name.startswith(("torch.cuda", "torch.nn", "torch.optim")) for name in used)


@each_module
def test_nothing_is_unpickled_and_nothing_is_evaluated(path: Path) -> None:
    tree = tree_of(path)
    unpicklers = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "copyreg"}
    assert not tops(path) & unpicklers
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in {"eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec"}
            assert called not in {"torch.load", "np.load", "numpy.load", "torch.jit.load", "torch.package"}
            assert not any(keyword.arg == "allow_pickle" for keyword in node.keywords)
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            assert "load" not in {alias.name for alias in node.names}


@each_module
def test_no_remote_model_code_is_trusted_and_no_shell_is_used(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in {"os.system", "os.popen"}
            for keyword in node.keywords:
                if keyword.arg in {"trust_remote_code", "shell"}:
                    assert ast.unparse(keyword.value) == "False"


@each_module
def test_remote_input_is_checked_by_if_and_not_by_assert(path: Path) -> None:
    assert not [node.lineno for node in ast.walk(tree_of(path)) if isinstance(node, ast.Assert)]


@each_module
def test_only_the_command_line_configures_logging(path: Path) -> None:
    if path.relative_to(ROOT) != Path("p2p_trainer/reporting.py"):
        calls = {ast.unparse(node.func) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)}
        assert "logging.basicConfig" not in calls


@pytest.mark.parametrize("path", sorted((ROOT / "peers").rglob("*.py")), ids=lambda path: path.name)
def test_bytes_and_tensors_of_remote_peers_are_touched_in_the_named_files_only(path: Path) -> None:
    named = {"codecs.py", "messages.py", "reducer.py", "round.py", "transfer.py"}
    decoding = {"frombuffer", "unpackb", "from_numpy"}
    calls = {
        node.func.attr
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    if path.name == "arena.py":
        calls.discard("frombuffer")  # of our own shared memory
    assert path.name in named or not calls & decoding


@each_module
def test_every_module_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(tree_of(path))


def test_the_three_packages_are_shipped_and_nothing_else() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert sorted(wheel.pop("packages")) == sorted(PACKAGES)
    assert wheel == {}, "nothing is forced into the wheel or taken out of it"
    assert project["project"]["scripts"] == {"p2p-trainer": "p2p_trainer.cli:main"}
    assert all((ROOT / package / "py.typed").is_file() for package in PACKAGES)
    folders = {folder.name for folder in ROOT.iterdir() if folder.is_dir() and not folder.name.startswith(".")}
    with_code = {name for name in folders if any((ROOT / name).rglob("*.py"))}
    assert with_code <= {*PACKAGES, "tests"}


def test_hivemind_is_pinned_exactly_and_torch_stays_below_its_gigabytes_of_cuda() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert "hivemind==1.1.12" in dependencies
    (torch_range,) = [line for line in dependencies if line.startswith("torch")]
    assert torch_range.endswith("<2.14")
    assert not [line for line in dependencies if line.startswith("pynvml")]
