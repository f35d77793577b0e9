"""`manifest.json`: canonical, self-checking, and safe to read whatever it holds."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lw.dist_checkpointing.coverage import check_manifest, problems
from megatron_lw.dist_checkpointing.directory import step_directory
from megatron_lw.dist_checkpointing.manifest import Manifest
from megatron_lw.dist_checkpointing.manifest_json import from_bytes, to_bytes
from megatron_lw.errors import CheckpointError
from tests.checkpoint_files import write_files
from tests.crash_storage import MemoryStorage


def manifest_of(seed: int = 0) -> Manifest:
    storage, directory = MemoryStorage(), step_directory(Path("/run"), 7)
    storage.make_directory(directory)
    return write_files(storage, directory, seed=seed)


MANIFEST = manifest_of()
TREE: dict[str, Any] = json.loads(to_bytes(MANIFEST))["manifest"]


def signed(body: bytes, fmt: str = "megatron_lw checkpoint", version: str = "1") -> bytes:
    """A manifest with a right checksum, whatever it holds."""
    digest = hashlib.sha256(body).hexdigest()
    head = f'{{"format":"{fmt}","version":{version},"sha256":"{digest}","manifest":'
    return head.encode() + body + b"}\n"


def changed(path: str, value: object) -> bytes:
    """The signed manifest with another value at a path such as "files.0.nbytes"."""
    tree = copy.deepcopy(TREE)
    at: Any = tree
    *above, last = path.split(".")
    for key in above:
        at = at[int(key)] if isinstance(at, list) else at[key]
    if value is None and isinstance(at, dict):
        del at[last]
    else:
        at[int(last) if isinstance(at, list) else last] = value
    return signed(json.dumps(tree).encode())


def test_it_comes_back_and_is_plain_json() -> None:
    data = to_bytes(MANIFEST)
    assert from_bytes(data, "m") == MANIFEST
    assert to_bytes(from_bytes(data, "m")) == data
    tree = json.loads(data)
    assert list(tree) == ["format", "version", "sha256", "manifest"]
    assert data.isascii() and data.count(b"\n") == 1
    assert list(problems(MANIFEST)) == []


def test_equal_manifests_give_equal_bytes_in_whatever_order_they_were_made() -> None:
    turned = replace(
        MANIFEST,
        topology=dict(reversed(MANIFEST.topology.items())),
        values=dict(reversed(MANIFEST.values.items())),
    )
    assert list(turned.topology) != list(MANIFEST.topology)
    assert to_bytes(turned) == to_bytes(MANIFEST)
    assert to_bytes(manifest_of(1)) != to_bytes(MANIFEST)


def test_every_bit_counts() -> None:
    data = bytearray(to_bytes(MANIFEST))
    passed = []
    for byte in range(len(data)):
        for bit in range(8):
            data[byte] ^= 1 << bit
            try:
                from_bytes(bytes(data), "m")
                passed.append((byte, bit))
            except CheckpointError:
                pass
            data[byte] ^= 1 << bit
    assert passed == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "^m: not the manifest of a checkpoint"),
        (b"\x80\x04.", r"^m: not the manifest of a checkpoint; it begins b'\\x80"),
        (b"{}", "not the manifest"),
        (signed(b"{}", fmt="another"), "not the manifest"),
        (signed(b"{}", version="2"), "^m: format version 2, but this library reads 1; use the"),
        (signed(b"{}")[:-1], "damaged: it does not fit its own SHA-256"),
        (signed(b"{}") + b" ", "damaged"),
        (signed(b"{}").replace(b'"version":1', b'"version":01'), "damaged"),
        (signed(b"{"), "no valid JSON"),
        (signed(b"\xff"), "no valid JSON"),
        (signed(b"[" * 100_000), "no valid JSON"),
        (signed(b"NaN"), "NaN is no JSON"),
        (signed(b"1e999"), "1e999 is too large"),
        (signed(b"9" * 5000), "is too large"),
        (signed(b'{"a":1,"a":2}'), "an object has a key twice"),
        (signed(b"[]"), "^m: expected an object"),
        (signed(b"{}"), "^m: step is missing"),
        (changed("more", 1), r"^m: unknown fields \['more'\]"),
        (changed("tensors.0.more", 1), r"^m: tensors: unknown fields \['more'\]"),
        (changed("step", -1), "^m: step: expected an integer from 0"),
        (changed("step", True), "step: expected an integer"),
        (changed("step", 1.0), "step: expected an integer"),
        (changed("step", 1 << 63), "step: expected an integer"),
        (changed("topology.dp", "2"), "topology: dp: expected an integer"),
        (changed("topology", []), "topology: expected an object"),
        (changed("tensors", {}), "tensors: expected a list"),
        (changed("tensors.0.name", 3), "tensors: name: expected a string"),
        (changed("tensors.0.name", "\ud800"), "tensors: name: .* is no text"),
        (changed("groups.\ud800", 1), "groups: .* is no text"),
        (changed("tensors.0.dtype", "object"), "dtype 'object' is none of"),
        (changed("tensors.0.shape", [1 << 40, 1 << 40]), "more than 2..63-1 elements"),
        (changed("tensors.0.pieces.0", [[0], [6], 1]), "pieces: expected a list of 4"),
        (changed("params.0.is_stack", 0), "is_stack: expected true or false"),
        (changed("params.0.shape", None), "params: shape is missing"),
        (changed("files.0.name", "../../etc/passwd"), "is no name of a data file"),
        (changed("files.0.name", "rank00000-0123456789abcdef.safetensors\n"), "is no name"),
        (changed("files.0.checksums.0", "ABCDEF0123456789"), "is no XXH3"),
        (changed("rows.0.runs.0", "abc"), "runs: expected a list of 3"),
        (changed("rows.1.padding.0", [1]), "padding: expected a list of 2"),
    ],
)
def test_what_is_no_manifest_is_refused_with_the_reason(data: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        from_bytes(data, "m")


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 3)
    | st.sampled_from([1 << 31, 1 << 62, (1 << 63) - 1, 1 << 64, 0.5, "", "layers.0.weight", "$a"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from("a $tensor $dict".split()), inner)
    ),
    max_leaves=6,
)


def places(tree: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    if isinstance(tree, dict | list):
        for key, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
            found += places(item, (*path, key))
    return found


@given(st.lists(st.tuples(st.sampled_from(places(TREE)), json_values), min_size=1, max_size=3))
def test_a_signed_manifest_of_anything_reads_or_is_refused(
    changes: list[tuple[tuple[Any, ...], object]],
) -> None:
    """Whoever signs it: reading and checking it end in a manifest or a `CheckpointError`."""
    tree: Any = copy.deepcopy(TREE)
    for path, value in changes:
        at = tree
        try:
            for key in path[:-1]:
                at = at[key]
            if path:
                at[path[-1]] = value
            else:
                tree = value
        except (TypeError, KeyError, IndexError):
            pass  # an earlier change took that place away
    try:
        manifest = from_bytes(signed(json.dumps(tree).encode()), "m")
        check_manifest(manifest)
    except CheckpointError:
        return
    assert to_bytes(manifest) == signed(
        json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()
    )


Change = Callable[[Manifest], Manifest]


def tensor(manifest: Manifest, key: str, **changes: Any) -> Manifest:
    found = tuple(
        replace(each, **changes) if each.key == key else each for each in manifest.tensors
    )
    assert found != manifest.tensors
    return replace(manifest, tensors=found)


def pieces(key: str, change: Callable[[list[Any]], list[Any]]) -> Change:
    def changed(manifest: Manifest) -> Manifest:
        [found] = [each for each in manifest.tensors if each.key == key]
        return tensor(manifest, key, pieces=tuple(change(list(found.pieces))))

    return changed


def row(index: int, **changes: Any) -> Change:
    def changed(manifest: Manifest) -> Manifest:
        rows = list(manifest.rows)
        rows[index] = replace(rows[index], **changes)
        return replace(manifest, rows=tuple(rows))

    return changed


def file(index: int, **changes: Any) -> Change:
    def changed(manifest: Manifest) -> Manifest:
        files = list(manifest.files)
        files[index] = replace(files[index], **changes)
        return replace(manifest, files=tuple(files))

    return changed


def param(**changes: Any) -> Change:
    return lambda m: replace(m, params=(m.params[0], replace(m.params[1], **changes)))


WEIGHT = "layers.0.weight/master"
RUNS = MANIFEST.rows[1].runs
RECORD = MANIFEST.files[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (pieces(WEIGHT, lambda p: p[:-1]), f"'{WEIGHT}' .* element .4, 0. is in no piece"),
        (pieces(WEIGHT, lambda p: [*p, p[0]]), "element .0, 0. is in 2 pieces"),
        (pieces(WEIGHT, lambda p: [replace(p[0], file=9), *p[1:]]), "file 9 is none of the 2"),
        (pieces(WEIGHT, lambda p: [replace(p[0], offset=0), *p[1:]]), "belong to two, at 'layers"),
        (
            pieces(WEIGHT, lambda p: [replace(p[0], offset=p[0].offset + 1), *p[1:]]),
            "belong to nothing, at 'layers.0.weight/master@0,0'",
        ),
        (lambda m: tensor(m, WEIGHT, shape=(6, 5)), "element .0, 4. is in no piece"),
        (lambda m: tensor(m, WEIGHT, dtype="object"), f"'{WEIGHT}': dtype 'object'"),
        (lambda m: tensor(m, WEIGHT, dtype="float64"), "belong to"),
        (lambda m: tensor(m, WEIGHT, state="other"), "'layers.0.weight' has no 'master'"),
        (lambda m: tensor(m, WEIGHT, state="value"), "is of a stepped parameter, which has no"),
        (lambda m: tensor(m, "layers.0.scale/value", state="x"), "is of no stepped parameter"),
        (lambda m: replace(m, tensors=(m.tensors[0], *m.tensors)), "'.*/master' is there 2 times"),
        (lambda m: replace(m, params=m.params * 2), "'layers.0.bias' is there 2 times"),
        (param(group="none"), "'layers.0.weight': its group 'none' is not there"),
        (param(child="adam"), "'layers.0.weight': its child 'adam' is not there"),
        (param(shape=(4, 6)), f"'{WEIGHT}' has shape .6, 4., not .4, 6."),
        (param(names=("layers.0.bias",)), "the name 'layers.0.bias' is there 2 times"),
        (
            lambda m: replace(m, children={"muon": replace(m.children["muon"], state_keys=("v",))}),
            "parameter 'layers.0.bias' has no 'v'",
        ),
        (
            lambda m: replace(
                m, children={"muon": replace(m.children["muon"], values={"layers.1": 1})}
            ),
            "child 'muon' has values for 'layers.1', which it does not step",
        ),
        (lambda m: replace(m, rows=(*m.rows, m.rows[0])), "row .* is there 2 times"),
        (row(1, padding=((9, 17),)), "runs and padding end at 23, the row at 26"),
        (row(1, padding=((9, 16), (23, 26))), "16 to 17 are in nothing at layers.0.bias"),
        (row(1, padding=((8, 17), (23, 26))), "elements 8 to 9 are in two at padding"),
        (row(1, padding=((9, 17), (17, 17), (23, 26))), "padding from 17 to 17 is empty"),
        (row(1, length=27), "end at 26, the row at 27"),
        (row(1, runs=(replace(RUNS[0], name="x"), RUNS[1])), "holds unknown 'x'"),
        (
            row(1, runs=RUNS[1:], padding=((0, 17), (23, 26))),
            "'layers.0.weight' has 24 elements, but rows hold 15, no whole copies",
        ),
        (lambda m: replace(m, rows=()), "has 24 elements, but rows hold 0"),
        (file(0, nbytes=RECORD.nbytes + 1), "its pieces end at byte .*, the file at"),
        (file(0, checksums=()), f"0 checksums for {RECORD.nbytes} bytes"),
        (file(0, checksums=("0" * 16,)), "the name does not fit rank, size and checksums"),
        (file(0, rank=1), "the name does not fit"),
        (file(1, name=RECORD.name), "is there 2 times"),
        (
            lambda m: replace(m, values={"extra": [{"a": {"$tensor": "extra/1"}}]}),
            "extra holds tensor 'extra/1', which is not there",
        ),
    ],
)
def test_what_breaks_the_contract_is_named(change: Change, message: str) -> None:
    with pytest.raises(
        CheckpointError, match=f"the manifest of step 7 is inconsistent: .*{message}"
    ):
        check_manifest(change(MANIFEST))


def test_copies_on_several_ranks_are_whole_or_refused() -> None:
    """A parameter that tensor parallelism replicates lies in as many rows."""
    bias = replace(
        MANIFEST.rows[1], rank=2, length=6, runs=(replace(RUNS[1], start=0),), padding=()
    )
    check_manifest(replace(MANIFEST, rows=(*MANIFEST.rows, bias)))
    half = replace(bias, length=3, runs=(replace(bias.runs[0], numel=3),))
    with pytest.raises(CheckpointError, match="6 elements, but rows hold 9"):
        check_manifest(replace(MANIFEST, rows=(*MANIFEST.rows, half)))


def test_many_problems_are_cut_short() -> None:
    chance = random.Random(0)
    broken = [replace(each, pieces=(), name=f"{chance.random()}") for each in MANIFEST.tensors * 4]
    with pytest.raises(CheckpointError) as raised:
        check_manifest(replace(MANIFEST, tensors=tuple(broken)))
    assert str(raised.value).count(";") == 10 and str(raised.value).endswith("; and more")
