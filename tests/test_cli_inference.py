"""`sample`, `export` and `fit --init_from` on a model that was trained a little."""

from __future__ import annotations

import csv
import json
import signal
import sys
from pathlib import Path

import pytest
import torch
import yaml
from cli_runs import in_own_process, last_checkpoint, tiny, write_corpus

from mutransformer.cli import main
from mutransformer.data.tokenizer import ByteTokenizer
from mutransformer.inference.weights import load_module


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def checkpoint(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("trained")
    factors = ["--model.parametrization.output_multiplier=3", "--model.parametrization.d_base=16"]
    assert main(["fit", *tiny(corpus, root, *factors, "--trainer.precision=bf16-mixed")]) == 0
    return str(last_checkpoint(root))


def sampled(capsys: pytest.CaptureFixture[str], checkpoint: str, *options: str) -> str:
    capsys.readouterr()
    assert main(["sample", f"--ckpt_path={checkpoint}", "--trainer.accelerator=cpu", "--max_tokens=40", *options]) == 0
    return capsys.readouterr().out


def as_objects(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_greedy_text_is_the_argmax_of_the_module(checkpoint, capsys):
    text = sampled(capsys, checkpoint, "--prompt=abc", "--temperature=0", "--max_tokens=12")
    module, ids = load_module(checkpoint), [1, *ByteTokenizer().encode("abc").tolist()]
    for _ in range(12):
        ids.append(int(module(torch.tensor([ids]))[0, -1].argmax()))
    assert text == ByteTokenizer().decode(ids[1:]) + "\n"


def test_texts_of_a_file_are_those_of_each_prompt_alone(checkpoint, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_bytes(b"ab c\n\n\xff\xfe\r\n" + "日本".encode() + b"\nab c\n")
    options = ["--samples=2", "--top_p=0.9", "--top_k=20", "--min_p=0.01", "--format=jsonl"]
    found = as_objects(sampled(capsys, checkpoint, f"--prompts={tmp_path / 'prompts.txt'}", "--batch_size=3", *options))
    assert [(one["prompt"], one["sample"]) for one in found] == [
        (prompt, k) for prompt in ("ab c", "\ufffd\ufffd", "日本", "ab c") for k in (1, 2)
    ]
    alone = as_objects(sampled(capsys, checkpoint, "--prompt=日本", *options))
    assert [one["text"] for one in alone] == [one["text"] for one in found[4:6]]
    assert len({one["text"] for one in found}) == len(found)
    assert {one["ended_by"] for one in found} <= {"separator", "max_tokens"}
    assert all(one["n_tokens"] == 40 or one["ended_by"] == "separator" for one in found)
    assert as_objects(sampled(capsys, checkpoint, "--prompt=日本", *options, "--seed=1")) != alone


def test_text_stops_at_the_separator(checkpoint, capsys, monkeypatch):
    always = torch.ones(1, dtype=torch.int64)
    monkeypatch.setattr("mutransformer.inference.decoding.choose", lambda logits_BV, *_: always)
    (one,) = as_objects(sampled(capsys, checkpoint, "--prompt=a", "--format=jsonl"))
    assert (one["text"], one["n_tokens"], one["ended_by"]) == ("", 1, "separator")


def test_beginnings_of_validation_documents_are_prompts(checkpoint, corpus, capsys):
    found = as_objects(sampled(capsys, checkpoint, "--from_validation=3", "--prompt_tokens=9", "--format=jsonl"))
    texts = [path.read_text() for path in Path(corpus).parent.glob("*.txt")]
    assert len({one["prompt"] for one in found}) == 3
    for one in found:
        assert len(one["prompt"]) == 9 and any(text.startswith(one["prompt"]) for text in texts)


def test_several_texts_have_headings_and_one_has_none(checkpoint, capsys):
    options = ["--prompt=ab", "--temperature=0", "--max_tokens=5"]
    (one,) = sampled(capsys, checkpoint, *options).splitlines()
    two = sampled(capsys, checkpoint, *options, "--samples=2").splitlines()
    assert two == ["--- prompt 1, sample 1 ---", one, "--- prompt 1, sample 2 ---", one]


MISTAKES = {
    "no checkpoint": (["--ckpt_path="], "ckpt_path"),
    "missing checkpoint": (["--ckpt_path=/no/such.ckpt"], "there is no such file"),
    "missing file": (["--prompts=/no/such.txt"], "cannot be read"),
    "empty file": (["--prompts=EMPTY"], "holds no prompt"),
    "two kinds": (["--prompt=a", "--from_validation=1"], "give one of them"),
    "too many documents": (["--from_validation=1000"], "the validation split has"),
    "negative": (["--from_validation=-1"], "must be at least 0"),
    "top_p": (["--top_p=0"], "top_p=0"),
    "temperature": (["--temperature=-1"], "temperature=-1"),
    "min_p": (["--min_p=2"], "min_p=2"),
    "top_k": (["--top_k=-1"], "top_k=-1"),
    "samples": (["--samples=0"], "samples=0"),
    "max_tokens": (["--max_tokens=0"], "max_tokens=0"),
    "batch_size": (["--batch_size=0"], "batch_size=0"),
    "unknown": (["--temprature=1"], "did you mean temperature?"),
    "model": (["--model.decoder.d_model=64"], "has 32"),
    "accelerator": (["--trainer.accelerator=tpu"], "use cpu"),
    "precision": (["--trainer.precision=16-true"], "bf16-mixed"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_one_line_and_nothing_is_sampled(name, checkpoint, tmp_path, capsys):
    options, said = MISTAKES[name]
    (tmp_path / "empty.txt").write_text("\n \n")
    options = [option.replace("EMPTY", str(tmp_path / "empty.txt")) for option in options]
    assert main(["sample", f"--ckpt_path={checkpoint}", "--trainer.accelerator=cpu", *options]) == 2
    out, error = capsys.readouterr()
    assert said in error and len(error.splitlines()) == 1 and out == ""


def test_a_signal_says_how_far_it_came(checkpoint):
    process = in_own_process(
        "sample", f"--ckpt_path={checkpoint}", "--prompt=a", "--samples=1000000000", "--max_tokens=10000000"
    )
    assert process.stdout is not None and process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in out + error
    assert "SIGINT: stopped after " in out.splitlines()[-1]


@pytest.mark.slow
def test_a_reader_that_leaves_ends_it_quietly(checkpoint):
    process = in_own_process("sample", f"--ckpt_path={checkpoint}", "--samples=1000000000")
    assert process.stdout is not None and process.stderr is not None and process.stdout.read(20)
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == ""
    process.stderr.close()


def test_a_terminal_gets_the_prompt_bold_and_no_control_characters(checkpoint, capsys, monkeypatch):
    options = ["--prompt=a\x1b[2J", "--max_tokens=3", "--temperature=0"]
    assert sampled(capsys, checkpoint, *options).startswith("a\x1b[2J")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert sampled(capsys, checkpoint, *options).startswith("\x1b[1ma\u241b[2J\x1b[0m")


# export and init_from


@pytest.fixture(scope="module")
def exported(checkpoint, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "deeper" / "model"
    assert main(["export", f"--ckpt_path={checkpoint}", f"--out={out}"]) == 0
    return out


def test_export_says_what_it_wrote(checkpoint, tmp_path, capsys):
    out = tmp_path / "model"
    assert main(["export", f"--ckpt_path={checkpoint}", f"--out={out}"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{out}: ArceeForCausalLM, an architecture of transformers; 1 safetensors file\n")
    assert "logits differ from the checkpoint's by " in said
    assert f'AutoModelForCausalLM.from_pretrained("{out}")' in said
    assert {path.name for path in out.iterdir()} == {
        *("README.md", "config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    }
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {(out / "config.json").stat().st_mode & 0o777}
    assert main(["export", f"--ckpt_path={checkpoint}", f"--out={out}"]) == 2
    assert "is there and is not an empty folder" in capsys.readouterr().err
    plain = tmp_path / "plain"
    assert main(["export", f"--ckpt_path={checkpoint}", f"--out={plain}", "--format=safetensors"]) == 0
    assert "read back to the same bits" in capsys.readouterr().out
    assert main(["export", f"--ckpt_path={checkpoint}", f"--out={tmp_path / 'quick'}", "--verify=false"]) == 0
    assert "logits were not compared" in capsys.readouterr().out


@pytest.mark.parametrize("options", [[], ["--ckpt_path=CKPT"], ["--ckpt_path=/no/such", "--out=OUT"]])
def test_export_needs_a_checkpoint_and_a_folder(options, checkpoint, tmp_path, capsys):
    options = [option.replace("CKPT", checkpoint).replace("OUT", str(tmp_path / "out")) for option in options]
    assert main(["export", *options]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def weights_of(path: Path | str) -> dict[str, torch.Tensor]:
    state = torch.load(path, weights_only=True)["state_dict"]
    return {name: tensor for name, tensor in state.items() if name.startswith("decoder.")}


def test_a_run_begins_from_an_export_and_resumes_without_it(corpus, checkpoint, exported, tmp_path, capsys):
    begin = [f"--init_from={exported}", "--trainer.precision=bf16-mixed", "--model.optimizer.learning_rate=0.001"]
    root = tmp_path / "begun"
    assert main(["fit", *tiny(corpus, root, *begin, "--trainer.max_steps=8", "--model.schedule.warmup_steps=2")]) == 0
    with (root / "version_0/metrics.csv").open() as file:
        assert float(next(csv.DictReader(file))["train_loss"]) < 3  # nats; a model that begins anew is at 5.9
    assert yaml.safe_load((root / "version_0/config.yaml").read_text())["init_from"] == str(exported)

    # resumed with the folder gone: it is not read
    gone = f"--init_from={tmp_path / 'gone'}"
    capsys.readouterr()
    resume = [f"--ckpt_path={last_checkpoint(root)}", gone, *begin[1:], "--trainer.max_steps=10"]
    resume += ["--model.schedule.warmup_steps=2"]
    assert main(["fit", *tiny(corpus, tmp_path / "on", *resume)]) == 0
    assert main(["fit", *tiny(corpus, tmp_path / "no", gone)]) == 2
    assert "there is no such file or folder" in capsys.readouterr().err
    assert not (tmp_path / "no").exists() or not list((tmp_path / "no").rglob("config.yaml"))


def test_a_step_of_zero_shows_the_weights_that_a_run_began_with(corpus, checkpoint, exported, tmp_path):
    """Multipliers are those of the new run, 1 here and 3 there; the learning rate is 0."""
    still = ["--model.optimizer.learning_rate=0", "--trainer.max_steps=1"]
    assert main(["fit", *tiny(corpus, tmp_path / "a", f"--init_from={exported}", *still)]) == 0
    assert main(["fit", *tiny(corpus, tmp_path / "b", f"--init_from={checkpoint}", *still)]) == 0
    theirs = weights_of(checkpoint)
    for root in ("a", "b"):
        ours = weights_of(last_checkpoint(tmp_path / root))
        for name, tensor in theirs.items():
            factor = 3 if name == "decoder.unembedding" else 1
            assert torch.allclose(ours[name], tensor * factor, rtol=1e-6, atol=0), name
