# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are made to take memory or time: reading one takes at most 16 times the bytes of its files and 64
MiB, and about a second for each MiB, whether it is refused or not."""

import json
import os
import struct
import sys
import unittest
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from commands import BIN, FolderTest, run
from torch_formats import METADATA, archive, dtensor, pickled, placement, safetensors, tensor

SMALL = "RESHARD_SMALL" in os.environ
MIB = 1 << 20
BYTES = MIB >> (6 if SMALL else 0)  # of most inputs
FILESYSTEM = "torch.distributed.checkpoint.filesystem"


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def numbers(*values: int) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def kept(value: bytes, at: int) -> bytes:
    """A value that later ones refer to, taken from the stack again."""
    return value + b"r" + struct.pack("<I", at) + b"0"


def again(at: int) -> bytes:
    return b"j" + struct.pack("<I", at)


SHARED: dict[bytes, int] = {}  # values that every `.metadata` begins with, and their numbers


def shared(value: bytes) -> bytes:
    """A value that is stated once."""
    return again(SHARED.setdefault(value, (1 << 20) + len(SHARED)))


def instance(module: str, name: str, **state: bytes) -> bytes:
    return (
        shared(f"c{module}\n{name}\n".encode())
        + b")R}("
        + b"".join(shared(text(key)) + value for key, value in state.items())
        + b"ub"
    )


def metadata(before: bytes, items: bytes, places: bytes) -> bytes:
    """A `.metadata` whose dictionaries have these keys and values. `before`: values that are kept."""
    root = instance(METADATA, "Metadata", state_dict_metadata=b"}(" + items + b"u", storage_data=b"}(" + places + b"u")
    return b"\x80\x02" + b"".join(kept(value, number) for value, number in SHARED.items()) + before + root + b"."


def index(name: bytes, offset: bytes) -> bytes:
    return instance(METADATA, "MetadataIndex", fqn=name, offset=offset)


def info(file: bytes = text("__0_0.distcp"), begin: bytes = number(0), length: int = 0) -> bytes:
    return instance(FILESYSTEM, "_StorageInfo", relative_path=file, offset=begin, length=number(length))


def chunk(offsets: bytes, sizes: bytes) -> bytes:
    return instance(METADATA, "ChunkStorageMetadata", offsets=offsets, sizes=sizes)


def stored(size: bytes, chunks: bytes, dtype: str = "uint8") -> bytes:
    properties = shared(f"c{METADATA}\nTensorProperties\n)R(ctorch\n{dtype}\nNNNNtb".encode())
    return instance(METADATA, "TensorStorageMetadata", properties=properties, size=size, chunks=b"](" + chunks + b"e")


def repeated(make: Callable[[int], bytes], bytes: int = BYTES) -> bytes:
    """So many of something that they have so many bytes."""
    count = max(1, bytes // len(make(0)))
    return b"".join(make(i) for i in range(count))


class Dcp:
    """Hostile `.metadata`, with one file whose only entry is a tensor of `length` bytes."""

    def __init__(self, folder: Path, length: int = 1) -> None:
        self.folder = folder / "dcp"
        self.folder.mkdir()
        self.entry = archive(tensor(np.zeros((length, 1), np.uint8), "0"), [np.zeros(length, np.uint8)])
        (self.folder / "__0_0.distcp").write_bytes(self.entry)

    def write(self, *parts: bytes) -> Path:
        (self.folder / ".metadata").write_bytes(metadata(*parts))
        return self.folder

    def raw(self, pickle: bytes) -> Path:
        (self.folder / ".metadata").write_bytes(pickle)
        return self.folder


def hostile_metadata(folder: Path) -> Iterator[tuple[str, Callable[[], Path]]]:
    small = lambda: Dcp(folder)
    name, place, size, item = (again(i) for i in range(4))
    yield (
        "an offset of many numbers for each entry",
        lambda: small().write(
            kept(numbers(*range(BYTES // 10)), 0) + kept(info(), 1),
            b"",
            repeated(lambda i: index(text(f"{i:06}"), name) + place, BYTES // 2),
        ),
    )
    yield (
        "an offset of 64 numbers for each entry",
        lambda: small().write(
            kept(numbers(*range(64)), 0) + kept(info(), 1),
            b"",
            repeated(lambda i: index(text(f"{i:06}"), name) + place),
        ),
    )
    yield (
        "a long name for each entry",
        lambda: small().write(
            kept(text("n" * (BYTES // 2)), 0) + kept(info(), 1),
            b"",
            repeated(lambda i: index(name, numbers(i)) + place, BYTES // 2),
        ),
    )
    yield (
        "two long names for the entries in turn",
        lambda: small().write(
            kept(text("n" * (BYTES // 4)), 0) + kept(info(), 1) + kept(text("n" * (BYTES // 4)), 2),
            b"",
            repeated(lambda i: index(again(i % 2 * 2), numbers(i)) + place, BYTES // 2),
        ),
    )
    yield (
        "a long file name for each entry",
        lambda: small().write(
            kept(text("f" * (BYTES // 2)), 0),
            b"",
            repeated(lambda i: index(text(f"{i:06}"), numbers(0)) + info(name), BYTES // 2),
        ),
    )
    yield (
        "one tensor of 64 dimensions under many names",
        lambda: small().write(
            kept(stored(numbers(*[0] * 64), b""), 3), repeated(lambda i: b"\x8c\x05" + f"{i:05x}".encode() + item), b""
        ),
    )
    yield (
        "one long list of chunks for many tensors",
        lambda: small().write(
            kept(chunk(numbers(0), numbers(0)), 0) + kept(stored(numbers(0), name * (BYTES // 10)), 3),
            repeated(lambda i: text(f"{i:06}") + item, BYTES // 2),
            b"",
        ),
    )
    yield (
        "attributes of many instances in one dictionary",
        lambda: small().write(
            kept(b"}(" + repeated(lambda i: text(f"{i:06}") + b"N", BYTES // 2) + b"u", 0),
            repeated(
                lambda i: (
                    text(f"{i:06}") + shared(f"c{METADATA}\nTensorStorageMetadata\n".encode()) + b")R" + name + b"b"
                ),
                BYTES // 2,
            ),
            b"",
        ),
    )

    def overlapping(
        bytes: int, shape: Callable[[int], tuple[int, int]], offset: Callable[[int, int], tuple[int, int]]
    ) -> Path:
        """Chunks of one column each, of which many have a row in common."""
        length = 65536
        checkpoint = Dcp(folder, length)
        count = bytes // 160
        return checkpoint.write(
            kept(text("t"), 0)
            + kept(info(length=len(checkpoint.entry)), 1)
            + kept(numbers(length, 1), 2)
            + b"".join(kept(numbers(*offset(i, count)), 10 + i) for i in range(count)),
            name + stored(numbers(*shape(count)), b"".join(chunk(again(10 + i), size) for i in range(count))),
            b"".join(index(name, again(10 + i)) + place for i in range(count)),
        )

    yield (
        "chunks in steps",
        lambda: overlapping(6 * BYTES, lambda count: (count + 65536, count), lambda i, count: (i, i)),
    )
    yield (
        "chunks in rows that begin anywhere",
        lambda: overlapping(6 * BYTES, lambda count: (2 * 65536, count), lambda i, count: (i * 37 % 65536, i)),
    )
    yield (
        "chunks that are the tensor",
        lambda: overlapping(6 * BYTES, lambda count: (65536, count), lambda i, count: (0, i)),
    )

    def shared_archive(entry: bytes, begin: Callable[[int], int]) -> Path:
        """Many tensors in one large entry, or in parts of it."""
        checkpoint = Dcp(folder)
        (checkpoint.folder / "__0_0.distcp").write_bytes(entry)
        whole = kept(stored(numbers(1, 1), chunk(numbers(0, 0), numbers(1, 1))), 3)
        names = [text(f"{i:06}") for i in range(BYTES // 120)]
        return checkpoint.write(
            whole + kept(numbers(0, 0), 0),
            b"".join(each + item for each in names),
            b"".join(
                index(each, name) + info(begin=number(begin(i)), length=len(entry) - begin(i))
                for i, each in enumerate(names)
            ),
        )

    members = archive(tensor(np.zeros((1, 1), np.uint8), "0"), [np.zeros(1, np.uint8)] * (BYTES // 250))
    yield "one large archive for many tensors", lambda: shared_archive(members, lambda i: 0)
    yield "many parts of one archive", lambda: shared_archive(members, lambda i: i)


def hostile_pickles(folder: Path) -> Iterator[tuple[str, Callable[[], Path]]]:
    """Values alone, as `.metadata`: one byte of a pickle can make a value."""
    for name, unit, end in (
        ("lists", b"]", b"t."),
        ("dictionaries", b"}", b"t."),
        ("marks", b"(", b"."),
        ("tuples in tuples", b"\x85", b"."),
        ("references", b"h\0", b"t."),
        ("numbers", b"\x8a\0", b"t."),
        ("texts", b"\x8c\0", b"t."),
        ("calls", b"h\0)R", b"t."),
        ("kept values", b"\x94", b"."),
    ):
        yield (
            f"many {name}",
            lambda unit=unit, end=end: Dcp(folder).raw(
                b"\x80\x04" + f"c{METADATA}\nMetadata\n".encode() + b"q\0(" + unit * (4 * BYTES // len(unit)) + end
            ),
        )
    yield (
        "kept values of any number",
        lambda: Dcp(folder).raw(b"\x80\x02N" + repeated(lambda i: b"r" + struct.pack("<I", 2**31 + i)) + b"."),
    )
    yield (
        "a list that grows beside another",
        lambda: Dcp(folder).raw(b"\x80\x02]q\0]q\1" + b"h\0Nah\1Na" * (BYTES // 8) + b"h\0."),
    )


def hostile_torch_files(folder: Path) -> Iterator[tuple[str, Callable[[], Path]]]:
    one, pieces = np.zeros(64, np.uint8), np.zeros(32768, np.uint8)

    def file(value: object, arrays: Sequence[np.ndarray] = (one,)) -> Path:
        (folder / "x.pt").write_bytes(archive(value, arrays))
        return folder / "x.pt"

    def references(kind: object, unit: bytes = b"h\xff") -> bytes:
        """A list that has one value again and again."""
        return b"\x80\x02](" + pickled(kind)[2:-1] + b"q\xff" + unit * (BYTES // len(unit)) + b"e."

    yield "one tensor under many names", lambda: file(references(tensor(one, "0")))
    yield (
        "one tensor of 64 dimensions under many names",
        lambda: file(references(tensor(one[:1].reshape([1] * 64), "0"))),
    )
    yield (
        "one distributed tensor under many names",
        lambda: file(references(dtensor(one, "0", (64,), (1,), (0,), placement("Shard", dim=0)))),
    )
    yield (
        "one tensor in 32768 pieces under many names",
        lambda: file(
            references(
                dtensor(pieces, "0", (65536,), (2,), (0,), placement("_StridedShard", dim=0, split_factor=32768))
            ),
            [pieces],
        ),
    )
    yield "many values", lambda: file(b"\x80\x02](" + b"N" * 4 * BYTES + b"e.")
    yield "long names", lambda: file({"k" * (BYTES // 2): [None] * (BYTES // 4)})
    yield (
        "a list in a list in a list",
        lambda: file(b"\x80\x02]q\x000" + b"".join(b"]q%c(h%ch%ce0" % (i + 1, i, i) for i in range(60)) + b"h\x3c."),
    )
    many = 60_000 if not SMALL else 600
    yield (
        "a mesh of many dimensions",
        lambda: file({"a": dtensor(one, "0", (64,), (1,) * many, (0,) * many, *[placement("Replicate")] * many)}),
    )
    yield (
        "a mesh of 64 dimensions for each of many names",
        lambda: file(
            references(
                dtensor(
                    one,
                    "0",
                    (2**40,),
                    (1,) * 64,
                    (0,) * 64,
                    *[placement("_StridedShard", dim=0, split_factor=65536)] * 64,
                )
            )
        ),
    )
    other = b"\x80\x04" + b"]q\0(" + b"N" * (BYTES // 2) + b"e0"  # a long list
    yield (
        "many values of an unknown class with one list",
        lambda: file(other + b"](" + b"ca\nb\nh\0\x85R" * (BYTES // 20) + b"e."),
    )
    yield (
        "an unknown class of a long name",
        lambda: file(b"\x80\x04" + kept(text("n" * (BYTES // 2)), 0) + b"](" + b"h\0h\0\x93" * (BYTES // 10) + b"e."),
    )
    yield "many unknown classes", lambda: file(b"\x80\x04](" + repeated(lambda i: f"ca\n{i:06x}\n".encode()) + b"e.")
    yield "many members", lambda: file({}, [one[:1]] * (BYTES // 200))

    def compared() -> Path:
        """Tensors of two ranks that are nearly the whole storage, each at another place of it."""
        storage = np.zeros(2 * BYTES, np.uint8)
        (folder / "ranks").mkdir()
        unit = pickled(tensor(storage, "0"))[2:-1]
        length, offset = pickled(len(storage))[2:-1], b"K\0"
        assert unit.count(length) == 2 and unit.count(offset) == 1
        shifted = lambda i: (
            text(f"{i:05}") + unit.replace(b"QK\0" + length, b"Q" + number(i) + number(len(storage) - i))
        )
        pickle = b"\x80\x02}(" + repeated(shifted) + b"u."
        for rank in range(2):
            (folder / "ranks" / f"rank_{rank}.pt").write_bytes(archive(pickle, [storage]))
        return folder / "ranks"

    yield "tensors that ranks repeat", compared


def hostile_json(folder: Path) -> Iterator[tuple[str, Callable[[], Path]]]:
    def header(text: str, name: str = "model.safetensors", data: bytes = b"") -> Path:
        (folder / name).write_bytes(struct.pack("<Q", len(text)) + text.encode() + data)
        return folder

    def many(make: Callable[[int], str], bytes: int = 4 * BYTES) -> str:
        return ",".join(make(i) for i in range(bytes // (len(make(0)) + 1)))

    def tensor_of(i: int) -> str:
        return f'"{i:06x}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'

    yield "many tensors", lambda: header("{" + many(tensor_of) + "}")
    yield "many tensors without a form", lambda: header("{" + many(lambda i: f'"{i:06x}":{{}}') + "}")
    yield (
        "a shape of many numbers",
        lambda: header('{"a":{"dtype":"U8","data_offsets":[0,0],"shape":[' + many(lambda i: "0") + "]}}"),
    )
    yield "many texts of __metadata__", lambda: header('{"__metadata__":{' + many(lambda i: f'"{i:06x}":""') + "}}")
    yield (
        "many texts of DCP in __metadata__",
        lambda: header('{"__metadata__":{' + many(lambda i: f'"DCP_{i:06x}":""') + "}}"),
    )
    yield "many unknown keys of a tensor", lambda: header('{"a":{' + many(lambda i: f'"{i:06x}":0') + "}}")
    yield "arrays in arrays", lambda: header("{" + '"a":' + "[" * 4 * BYTES)
    yield "a number of many digits", lambda: header('{"a":' + "9" * 4 * BYTES + "}")
    yield "a text of many characters", lambda: header('{"a":"' + "\\u0041" * BYTES + '"}')

    def other(file: str, text: str, *others: str) -> Path:
        for each in others:
            (folder / each).write_bytes(b"")
        (folder / file).write_text(text)
        return folder

    yield (
        "an index of many tensors",
        lambda: other("model.safetensors.index.json", '{"weight_map":{' + many(lambda i: f'"{i:06x}":"f"') + "}}"),
    )
    yield (
        "an index of many files",
        lambda: other(
            "model.safetensors.index.json", '{"weight_map":{' + many(lambda i: f'"{i:06x}":"{i:06x}"') + "}}"
        ),
    )
    yield (
        "an index of many other keys",
        lambda: other("model.safetensors.index.json", "{" + many(lambda i: f'"{i:06x}":0') + "}"),
    )
    yield (
        "many keys in metadata.json",
        lambda: other("metadata.json", "{" + many(lambda i: f'"{i:06x}":0') + "}", ".metadata"),
    )
    yield (
        "many hashes",
        lambda: (
            Dcp(folder).write(b"", b"", b""),
            other("dcp/integrity.json", '{"files":{' + many(lambda i: f'"{i:06x}":"{"0" * 64}"') + "}}"),
        )[0],
    )
    yield (
        "many files without hashes",
        lambda: (
            Dcp(folder).write(b"", b"", b""),
            other("dcp/integrity.json", '{"files":{' + many(lambda i: f'"{i:06x}":0') + "}}"),
        )[0],
    )
    for name, value in (
        ("many", lambda i: f'"{i:06x}":{{"saved_offsets":[]}}'),
        ("large", lambda i: f'"{i:06x}":{{"saved_offsets":[{"0," * 63}0]}}'),
    ):
        yield (
            f"{name} offsets of shards",
            lambda value=value: header(
                json.dumps({"__metadata__": {"DCP_SHARDING_INFO": "{" + many(value) + "}"}}),
                "shard-00001-model-00001-of-00001.safetensors",
            ),
        )


#: Runs a command: prints its exit code, the KiB of its peak memory and the seconds of CPU time. A process begins with
#: the peak of the one that
#: starts it, so a small Python does.
MEASURED = """
import os, sys
process = os.fork()
if process == 0:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.execv(sys.argv[1], sys.argv[1:])
_, status, used = os.wait4(process, 0)
print([os.waitstatus_to_exitcode(status), used.ru_maxrss, used.ru_utime + used.ru_stime])
"""


class Bounds(FolderTest):
    def measure(self, path: Path, *command: object) -> None:
        size = sum(each.stat().st_size for each in ([path] if path.is_file() else path.rglob("*")))
        done = run(sys.executable, "-S", "-c", MEASURED, BIN / str(command[0]), *command[1:], code=None)
        code, kibibytes, seconds = json.loads(done.stdout.splitlines()[-1])
        self.assertIn(code, (0, 2), done.stderr)
        self.assertEqual(done.stderr.count("\n"), code // 2, done.stderr)
        self.assertLess(len(done.stderr), 2000 + 2 * len(str(path)))
        if not SMALL:  # sanitizers take memory and time of their own
            self.assertLessEqual(kibibytes << 10, 16 * size + 64 * MIB, done.stderr)
            self.assertLessEqual(seconds, 1 + size / MIB, done.stderr)

    def each(self, cases: Callable[[Path], Iterator[tuple[str, Callable[[], Path]]]]) -> None:
        number = 0
        folder = self.folder / "unused"
        while True:
            folder = self.folder / str(number)
            folder.mkdir()
            case = next((case for at, case in enumerate(cases(folder)) if at == number), None)
            if case is None:
                return
            with self.subTest(case[0]):
                path = case[1]()
                self.measure(path, "reshard-inspect", path)
                self.measure(path, "reshard-inspect", path, "--format=json")
            number += 1

    def test_metadata(self):
        self.each(hostile_metadata)

    def test_pickles(self):
        self.each(hostile_pickles)

    def test_torch_files(self):
        self.each(hostile_torch_files)

    def test_json(self):
        self.each(hostile_json)

    def test_a_description(self):
        """Each number in a name would be an index variable."""
        name = "a" + ".0" * (BYTES // 8)
        file = self.folder / "model.safetensors"
        safetensors(file, {name: np.zeros(1, np.uint8), name + ".b": np.zeros(1, np.uint8)}, None)
        self.measure(file, "reshard-compile", f"--describe={file}")


if __name__ == "__main__":
    unittest.main()
