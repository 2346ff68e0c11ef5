"""Checkpoints on Google Cloud Storage: the real gcsfs against a server on loopback."""

from __future__ import annotations

import pytest
from cli_runs import tiny, write_corpus
from gcs_server import file_system, gcs_server

from mutransformer.cli import main
from mutransformer.errors import ConfigError, SaveError
from mutransformer.training.checkpoint import AtomicCheckpointIO, checkpoints_in, load_plain, require_writable

# gcsfs hands aiohttp bytes, not a stream
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")


@pytest.fixture(scope="module", autouse=True)
def server():
    with gcs_server():
        yield


def test_a_run_keeps_its_checkpoints_there_goes_on_from_them_and_is_measured(tmp_path, capsys):
    corpus = write_corpus(tmp_path)
    folder = "gs://bucket/runs/one"
    run = tiny(corpus, tmp_path / "runs", f"--checkpoint.dirpath={folder}", "--checkpoint.every_n_steps=10")
    assert main(["fit", *run, "--trainer.max_steps=30"]) == 0
    kept = checkpoints_in(folder)
    assert list(kept) == [30]
    assert [path.rpartition("/")[2] for path in file_system().ls("bucket/runs/one")] == ["step_00000030.ckpt"]
    assert load_plain(kept[30])["global_step"] == 30
    capsys.readouterr()
    assert main(["fit", *run, "--resume=auto", "--trainer.max_steps=40"]) == 0
    assert f"goes on from {kept[30]}, step 30" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["version_0"]
    assert 40 in checkpoints_in(folder)
    options = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
    assert main(["validate", f"--ckpt_path={checkpoints_in(folder)[40]}", *options]) == 0
    assert f"written to {folder}/evaluations.csv" in capsys.readouterr().out
    assert b",40," in file_system().cat_file("bucket/runs/one/evaluations.csv")


def test_what_cannot_be_written_or_read_there_is_one_line():
    with pytest.raises(
        SaveError, match=r"^checkpoint gs://no-such-bucket/a\.ckpt could not be written \(.+\);"
    ) as error:
        AtomicCheckpointIO().save_checkpoint({}, "gs://no-such-bucket/a.ckpt")
    assert "\n" not in str(error.value)
    with pytest.raises(
        ConfigError, match=r"^checkpoint\.dirpath='gs://no-such-bucket/run': cannot be written to"
    ) as error:
        require_writable("checkpoint.dirpath", "gs://no-such-bucket/run")
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="there is no such file"):
        load_plain("gs://bucket/none.ckpt")
    assert checkpoints_in("gs://bucket/none") == {}
