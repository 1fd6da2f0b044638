"""Tests checkpoints that are rejected with an exit code and the place of the mistake; and fingerprints."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from batchinfer.core.errors import BatchInferError, JobFileError, SecurityRefusal
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from batchinfer.models.checkpoint.checkpoint import Checkpoint, inspect_checkpoint
from batchinfer.models.checkpoint.tensor_names import mtp_prefixes
from batchinfer.models.checkpoint.weights import CheckpointWeights, Tables
from batchinfer.models.files.weight_files import INDEX
from tests.checkpoints import edit_json, make_checkpoint, make_model_folder

SINGLE = "model.safetensors"
OUTSIDE = ("../outside.safetensors", "/etc/x.safetensors", "sub/../../x.safetensors", "..\\x.safetensors")
USED_INSTEAD = (
    "tokenizer_config.json names the tokenizer's own Python class, which is not run: tokenizer.json is used"
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete model folder with one weight file."""
    folder = tmp_path_factory.mktemp("sound")
    make_model_folder(folder, "llama")
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    make_checkpoint(folder, "qwen2", shards=3)
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


@pytest.fixture
def shards(sharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded, tmp_path / "model"))


def refused(path: Path, code: int, *parts: str) -> None:
    with pytest.raises(BatchInferError) as raised:
        inspect_checkpoint(path)
    assert raised.value.exit_code == code, str(raised.value)
    assert isinstance(raised.value, SecurityRefusal if code == 77 else JobFileError)
    for part in parts:
        assert part in str(raised.value)


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def code_that_leaves_a_mark(folder: Path, mark: Path) -> Path:
    """Make all Python classes of the checkpoint custom code that creates the file `mark` when imported."""
    code = f"import pathlib\npathlib.Path({str(mark)!r}).touch()\nclass X: ...\n"
    trap = folder / "own.py"
    trap.write_text(code)
    own = {"AutoConfig": "own.X", "AutoModelForCausalLM": "own.X", "AutoTokenizer": ["own.X", "own.X"]}
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        edit_json(folder / name, auto_map=own)
    edit_json(folder / "tokenizer_config.json", tokenizer_class="X")
    return trap


def tables_of(checkpoint: Checkpoint) -> Tables:
    return CheckpointWeights(checkpoint, torch.float32, "cpu").tables()


def test_sound(folder: Path) -> None:
    checkpoint = inspect_checkpoint(folder)
    assert checkpoint.files == (folder.resolve() / SINGLE,)
    assert checkpoint.dtype == "float32"
    tensors = load_file(folder / SINGLE)
    assert checkpoint.weight_bytes == sum(t.nbytes for t in tensors.values())
    assert set(checkpoint.tensors) == set(tensors)


def test_needs_no_torch(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from batchinfer.models.checkpoint.checkpoint import inspect_checkpoint\n"
        "from batchinfer.models.spec.model_cost import model_cost\n"
        "c = inspect_checkpoint(Path(sys.argv[1])); c.fingerprint({}); model_cost(c.spec, 4)\n"
        "print([m for m in ('torch', 'transformers', 'safetensors') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True, env=os.environ
    )
    assert out.stdout.strip() == "[]"


class TestMissing:
    def test_no_folder(self, tmp_path: Path) -> None:
        refused(tmp_path / "nowhere", 78, "nowhere is missing; a checkpoint folder")

    def test_a_file(self, folder: Path) -> None:
        refused(folder / SINGLE, 78, "is a file; a checkpoint folder")

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("config.json", "has no config.json"),
            (SINGLE, "no weights: model.safetensors or model.safetensors.index.json is needed"),
        ],
    )
    def test_a_file_of_the_folder(self, folder: Path, name: str, words: str) -> None:
        (folder / name).unlink()
        refused(folder, 78, words)

    def test_weights_of_another_name(self, folder: Path) -> None:
        (folder / SINGLE).rename(folder / "consolidated.safetensors")
        refused(folder, 78, "no weights", "found consolidated.safetensors")

    def test_missing_shard(self, shards: Path) -> None:
        next(shards.glob("model-00002-*")).unlink()
        refused(shards, 78, "names model-00002-", "missing in", "download may be incomplete")

    def test_index_is_not_json(self, shards: Path) -> None:
        (shards / INDEX).write_text("{")
        refused(shards, 78, "model.safetensors.index.json is not valid JSON")

    def test_index_names_the_wrong_shard(self, shards: Path) -> None:
        weight_map = json.loads((shards / INDEX).read_text())["weight_map"]
        files = sorted(set(weight_map.values()))
        name = next(n for n, f in weight_map.items() if f == files[0])
        edit_json(shards / INDEX, weight_map={**weight_map, name: files[1]})
        refused(shards, 78, "names files that do not hold", name)


class TestSecurity:
    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
    def test_pickle_only(self, folder: Path, name: str) -> None:
        (folder / SINGLE).unlink()
        (folder / name).write_bytes(pickle.dumps({}))
        refused(folder, 77, f"as pickle ({name})", "convert it to safetensors")

    def test_pickle_next_to_safetensors_is_not_read(self, folder: Path) -> None:
        (folder / "pytorch_model.bin").write_bytes(b"anything")
        assert [f.name for f in inspect_checkpoint(folder).files] == [SINGLE]

    def test_code_that_is_not_needed_is_not_run(self, folder: Path, sound: Path, tmp_path: Path) -> None:
        trap = code_that_leaves_a_mark(folder, tmp_path / "mark")
        wanted = inspect_checkpoint(sound)
        found = inspect_checkpoint(folder)
        assert (found.spec, found.notices) == (wanted.spec, (USED_INSTEAD,))
        weights = CheckpointWeights(found, torch.float32, "cpu")
        assert torch.equal(weights.tables().embedding, tables_of(wanted).embedding)
        assert Tokenizer.load(folder).rust.encode("ab").ids == Tokenizer.load(sound).rust.encode("ab").ids
        assert not (tmp_path / "mark").exists()
        subprocess.run([sys.executable, trap], check=True)  # the trap works
        assert (tmp_path / "mark").exists()

    @pytest.mark.parametrize("change", [{"model_type": "other"}, {"architectures": ["OtherForCausalLM"]}])
    def test_code_that_the_model_would_need(self, folder: Path, change: dict[str, Any]) -> None:
        edit_json(folder / "config.json", auto_map={"AutoConfig": "x.X"}, **change)
        refused(folder, 77, "config.json has an auto_map", "never does", "docs/models.md")

    @pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
    @pytest.mark.parametrize("auto_map", [{"AutoTokenizer": ["tokenization_x.X", None]}, ["x.X"]])
    def test_code_that_the_tokenizer_would_need(self, folder: Path, name: str, auto_map: Any) -> None:
        (folder / "tokenizer.json").unlink()
        edit_json(folder / name, auto_map=auto_map)
        refused(
            folder, 77, f"{name} has an auto_map", "the tokenizer's own Python class", "no tokenizer.json"
        )

    def test_code_of_generation_is_nothing_that_a_run_reads(self, folder: Path) -> None:
        edit_json(folder / "generation_config.json", auto_map={"AutoModel": "x.X"})
        assert inspect_checkpoint(folder).notices == ()

    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json", SINGLE])
    def test_link_to_a_file_outside(self, folder: Path, name: str) -> None:
        outside = folder.parent / "outside"
        (folder / name).rename(outside)
        (folder / name).symlink_to(outside)
        refused(folder, 77, f"{name} leads to", "outside the checkpoint")

    @pytest.mark.parametrize(
        ("name", "to", "words"),
        [
            ("extra.json", "../../nothing", "extra.json leads to"),
            ("loop", "loop", "loop is a link that leads nowhere"),
            ("sub", "..", "sub leads to"),
        ],
    )
    def test_other_links(self, folder: Path, name: str, to: str, words: str) -> None:
        (folder / name).symlink_to(to)
        refused(folder, 77, words)

    def test_link_inside_is_fine(self, folder: Path) -> None:
        (folder / SINGLE).rename(folder / "weights.data")
        (folder / SINGLE).symlink_to("weights.data")
        inspect_checkpoint(folder)

    def test_linked_checkpoint_folder_is_fine(self, folder: Path) -> None:
        (folder.parent / "alias").symlink_to("model")
        inspect_checkpoint(folder.parent / "alias")

    def test_hub_cache(self, sound: Path, tmp_path: Path) -> None:
        entry = tmp_path / "models--org--tiny"
        snapshot = entry / "snapshots" / "abc123"
        snapshot.mkdir(parents=True)
        shutil.copytree(sound, entry / "blobs")
        for file in (entry / "blobs").iterdir():
            (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
        assert inspect_checkpoint(snapshot).spec.family == "llama"
        (entry / "refs").mkdir()
        (entry / "refs" / "main").write_text("abc123")
        (snapshot / "extra").symlink_to("../../refs/main")
        refused(snapshot, 77, "extra leads to")

    def test_blobs_that_the_models_of_a_hub_cache_share(self, sound: Path, tmp_path: Path) -> None:
        snapshot = tmp_path / "models--org--tiny" / "snapshots" / "abc123"
        blobs, shared = snapshot.parents[1] / "blobs", tmp_path / "blobs" / "ab"
        for folder in (snapshot, blobs):
            folder.mkdir(parents=True)
        shutil.copytree(sound, shared)
        for file in shared.iterdir():
            (blobs / file.name).symlink_to(f"../../blobs/ab/{file.name}")
            (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
        refused(snapshot, 77, "leads to")  # any folder may be called blobs
        (tmp_path / "blobs" / ".huggingface-shared-blobs").write_text("1\n")
        assert inspect_checkpoint(snapshot).spec.family == "llama"
        (snapshot / "extra").symlink_to(__file__)
        refused(snapshot, 77, "extra leads to")

    @pytest.mark.parametrize(
        ("code", "words", "named"),
        [
            *((78, "wanted tensor names", weight_map) for weight_map in (None, {}, [1])),
            *((77, "only files inside the checkpoint folder are read", {"x": name}) for name in OUTSIDE),
            *((77, "only *.safetensors files are read", {"x": name}) for name in ("a.bin", "a.pt", 3, None)),
            *((77, "", {"x": f"{name}.safetensors"}) for name in ("\ud800", "\0", "x" * 300)),
        ],
    )
    def test_files_named_in_an_index(self, shards: Path, code: int, words: str, named: Any) -> None:
        edit_json(shards / INDEX, weight_map=named)
        refused(shards, code, INDEX, words)

    def test_pipe(self, folder: Path) -> None:
        (folder / SINGLE).unlink()
        os.mkfifo(folder / SINGLE)
        refused(folder, 77, "is not a regular file")

    def test_truncated_weights(self, folder: Path) -> None:
        os.truncate(folder / SINGLE, (folder / SINGLE).stat().st_size - 1)
        refused(folder, 77, SINGLE, "malformed safetensors header", "download or convert the file again")

    def test_tensor_in_two_shards(self, shards: Path) -> None:
        files = sorted(shards.glob("*.safetensors"))
        name, tensor = next(iter(load_file(files[0]).items()))
        save_file({**load_file(files[1]), name: tensor}, files[1])
        refused(shards, 77, name, "it may be in one file only")


K, Q_BIAS = "model.layers.1.self_attn.k_proj.weight", "model.layers.0.self_attn.q_proj.bias"
HEAD, NORM = "lm_head.weight", "model.norm.weight"


class TestTensors:
    @pytest.mark.parametrize(
        ("name", "tensor", "words"),
        [
            (K, None, f"missing tensors: {K}"),
            (HEAD, None, f"missing tensors: {HEAD}"),
            (Q_BIAS, torch.zeros(48), f"unexpected tensors: {Q_BIAS}"),
            (NORM, torch.ones(47), f"tensors of a wrong shape: {NORM} [47] instead of [48]"),
            (NORM, torch.ones(48, dtype=torch.int8), f"tensors that are not float: {NORM} (I8)"),
        ],
    )
    def test_one_of_another_model(self, folder: Path, name: str, tensor: Any, words: str) -> None:
        edit_tensors(folder, lambda t: t.pop(name) if tensor is None else t.update({name: tensor}))
        refused(folder, 78, words, "than llama")

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"num_hidden_layers": 4}, ("missing tensors: model.layers.2.", "and 13 more")),
            ({"num_hidden_layers": 1}, ("unexpected tensors: model.layers.1.", "and 4 more")),
            (
                {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
                ("missing tensors", "q_norm.weight", "another family than qwen3"),
            ),
        ],
    )
    def test_another_configuration(
        self, folder: Path, changes: dict[str, Any], words: tuple[str, ...]
    ) -> None:
        edit_json(folder / "config.json", **changes)
        refused(folder, 78, *words)

    def test_tied_without_either_table(self, folder: Path) -> None:
        edit_json(folder / "config.json", tie_word_embeddings=True)
        edit_tensors(folder, lambda t: (t.pop("lm_head.weight"), t.pop("model.embed_tokens.weight")))
        refused(folder, 78, "missing tensors: model.embed_tokens.weight, lm_head.weight")

    @pytest.mark.parametrize("left_out", ["lm_head.weight", "model.embed_tokens.weight"])
    def test_tied_needs_one_table(self, folder: Path, left_out: str) -> None:
        edit_json(folder / "config.json", tie_word_embeddings=True)
        edit_tensors(folder, lambda t: t.pop(left_out))
        inspect_checkpoint(folder)

    def test_layers_that_guess_further_tokens_are_ignored(self, tmp_path: Path) -> None:
        """DeepSeek-V3 has such a layer after its last one, with its own tables."""
        make_checkpoint(tmp_path, "deepseek_v3")
        wanted = inspect_checkpoint(tmp_path)
        edit_json(tmp_path / "config.json", num_nextn_predict_layers=...)  # transformers writes 1
        extra = (
            "embed_tokens.weight",
            "eh_proj.weight",
            "self_attn.o_proj.weight",
            "shared_head.head.weight",
        )
        edit_tensors(tmp_path, lambda t: t.update({f"model.layers.2.{n}": torch.ones(7) for n in extra}))
        refused(tmp_path, 78, "unexpected tensors: model.layers.2.")
        many = mtp_prefixes(wanted.spec, {"num_nextn_predict_layers": 10**5}, wanted.prefixes)
        assert len(many) <= 64, "config.json does not say how much memory is taken"
        edit_json(tmp_path / "config.json", num_nextn_predict_layers=1)
        assert inspect_checkpoint(tmp_path).tensors.keys() == wanted.tensors.keys()
        edit_tensors(tmp_path, lambda t: t.update({"model.layers.3.eh_proj.weight": torch.ones(7)}))
        refused(tmp_path, 78, "unexpected tensors: model.layers.3.eh_proj.weight")

    def test_ignored_buffers_take_no_memory(self, folder: Path, sound: Path) -> None:
        name = "model.layers.0.self_attn.rotary_emb.inv_freq"
        edit_tensors(folder, lambda t: t.update({name: torch.ones(6)}))
        assert inspect_checkpoint(folder).weight_bytes == inspect_checkpoint(sound).weight_bytes

    def test_an_unstated_dtype_is_the_one_with_the_maximum_bytes(self, folder: Path) -> None:
        edit_json(folder / "config.json", dtype=...)
        edit_tensors(folder, lambda t: t.update({n: v.bfloat16() for n, v in t.items() if "norm" not in n}))
        assert inspect_checkpoint(folder).dtype == "bfloat16"


class TestFingerprint:
    def test_same_content_elsewhere(self, folder: Path, sound: Path) -> None:
        assert inspect_checkpoint(folder).fingerprint({}) == inspect_checkpoint(sound).fingerprint({})

    def test_weights_count(self, folder: Path) -> None:
        before = inspect_checkpoint(folder).fingerprint({})
        edit_tensors(folder, lambda t: t["model.norm.weight"].add_(1e-3))
        assert inspect_checkpoint(folder).fingerprint({}) != before

    def test_the_fingerprint_has_the_config_without_its_author(self, folder: Path) -> None:
        before = inspect_checkpoint(folder).fingerprint({})
        edit_json(folder / "config.json", transformers_version="0.0")
        assert inspect_checkpoint(folder).fingerprint({}) == before
        edit_json(folder / "config.json", rms_norm_eps=1e-3)
        assert inspect_checkpoint(folder).fingerprint({}) != before

    def test_progress_adds_up(self, shards: Path) -> None:
        checkpoint = inspect_checkpoint(shards)
        done: list[int] = []
        checkpoint.fingerprint({}, done.append)
        assert sum(done) == sum(f.stat().st_size for f in checkpoint.files)

    def test_cache_spares_reading_until_the_file_changes(self, shards: Path) -> None:
        checkpoint = inspect_checkpoint(shards)
        cache: dict[str, str] = {}
        before = checkpoint.fingerprint(cache)
        assert len(json.loads(json.dumps(cache))) == len(checkpoint.files)
        for key in cache:
            cache[key] = "0" * 64
        assert checkpoint.fingerprint(cache) != before  # the hashes of the cache were used
        for file in checkpoint.files:
            os.utime(file, ns=(1, 1))
        assert checkpoint.fingerprint(cache) == before
