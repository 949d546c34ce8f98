"""python -m infer_server: the commands, their examples, and completion in a shell."""
from __future__ import annotations

import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from infer_server.__main__ import COMMANDS, SHELLS, completion, main, parser_of

with (Path(__file__).parents[3] / "pyproject.toml").open("rb") as file:
    SCRIPTS = tomllib.load(file)["project"]["scripts"]


def test_the_commands_are_those_that_are_installed() -> None:
    assert {name: command.main for name, command in COMMANDS.items()} == SCRIPTS


def test_help_has_an_example_of_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and max(map(len, text.splitlines())) <= 100
    assert all(command.summary in text and command.example in text for command in COMMANDS.values())


@pytest.mark.parametrize("command", COMMANDS)
def test_an_example_is_a_command_line_that_its_command_takes(command: str) -> None:
    name, *arguments = shlex.split(COMMANDS[command].example)
    assert name == command
    parser_of(command).parse_args(arguments)


def test_help_imports_no_command() -> None:
    program = """if True:
        import sys
        from infer_server.__main__ import main
        try:
            main(["--help"])
        finally:
            print(sorted({"numpy", "onnx", "llvmlite", "grpc"} & set(sys.modules)))"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\n[]\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_gets_its_arguments(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--version"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith(f"{command} ")


def test_an_unknown_command_is_refused_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["build"])
    text = capsys.readouterr().err
    assert ended.value.code == 2 and all(command in text for command in COMMANDS)


# ---- completion
def completed(folder: Path, line: str) -> list[str]:
    """Words that bash proposes at the end of a line, in a folder."""
    pytest.importorskip("shtab")
    command, *words = line.split(" ")
    (folder / "completion").write_text(completion("bash"))
    function = f"_shtab_{command.replace('-', '_')}"
    script = (f"source ./completion; COMP_WORDS=({shlex.join([command, *words])}); COMP_CWORD={len(words)}; "
              f"{function}; printf '%s\\n' \"${{COMPREPLY[@]}}\"")
    done = subprocess.run(["bash", "--norc", "-c", script], cwd=folder, capture_output=True, text=True, check=True)
    return sorted(done.stdout.split())


def test_bash_completes_options_choices_and_paths(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "plan_of_today").touch()
    assert completed(tmp_path, "inspect-engine --pro") == ["--profile"]
    assert completed(tmp_path, "infer-server --kind-gpu ") == ["cpu", "refuse"]
    assert completed(tmp_path, "infer-server --model-repository p") == ["photos"]
    assert completed(tmp_path, "run-engine p") == ["photos", "plan_of_today"]
    assert completed(tmp_path, "build-engine m.onnx --calib p") == ["photos", "plan_of_today"]
    assert completed(tmp_path, "load-test --scenario Sing") == ["SingleStream"]


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_has_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in COMMANDS)


def test_where_shtab_is_missing_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)         # importing it raises ImportError
    with pytest.raises(SystemExit, match=r"pip install 'infer-server\[completion\]'"):
        main(["completion", "bash"])
