"""The commands of ``python -m benchmarks``."""

import ast
import pathlib
import subprocess
import sys

import pytest

from benchmarks import __main__ as commands
from benchmarks import report

BENCHMARKS = pathlib.Path(commands.__file__).parent


@pytest.mark.parametrize("name", [*commands.COMMANDS, *commands.STARTED])
def test_a_command_is_a_module_with_main(name):
    nodes = ast.parse((BENCHMARKS / f"{name}.py").read_text()).body
    (main,) = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == "main"]
    assert main.args.args[0].arg == "argv"


def test_no_other_module_is_a_script():
    scripts = {path.stem for path in BENCHMARKS.rglob("*.py") if "__main__" in path.read_text()}
    assert scripts == {"__main__"}


def test_help_lists_the_commands_and_imports_none():
    code = "import sys; from benchmarks.__main__ import main; main([]); sys.exit('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=BENCHMARKS.parent)
    assert done.returncode == 0, done.stderr
    listed = dict(line.split(maxsplit=1) for line in done.stdout.splitlines()[2:])
    assert list(listed) == list(commands.COMMANDS)
    assert listed["run"] == "Times cutjax beside its peers"


def test_an_unknown_command_is_an_error(capsys):
    assert commands.main(["rum"]) == 2
    assert "no command 'rum'" in capsys.readouterr().err


def test_show(capsys):
    assert commands.main(["show", str(report.RESULTS / "syrk-h200.json")]) == 0
    assert "syrk-h200: NVIDIA H200" in capsys.readouterr().out
