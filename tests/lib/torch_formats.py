# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoints of torch.save and torch.distributed.checkpoint without PyTorch, so that `make test` can test their
reader with valid and with damaged files. tests/frameworks/checkpoint_formats_test.py compares with files of PyTorch."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np

METADATA = "torch.distributed.checkpoint.metadata"
STORAGES = {np.dtype("float32"): "FloatStorage", np.dtype("int64"): "LongStorage", np.dtype("uint8"): "ByteStorage"}
DTYPES = {np.dtype("float32"): "float32", np.dtype("int64"): "int64", np.dtype("uint8"): "uint8"}


class Global:
    """A class or function of a module that need not be installed."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name


class Call:
    """The result of a call of a global, with an optional state."""

    def __init__(self, module: str, name: str, arguments: tuple = (), state: object = None) -> None:
        self.target, self.arguments, self.state = Global(module, name), arguments, state


class Member:
    """A class within a class, which protocol 2 names by a call of getattr."""

    def __init__(self, outer: object, name: str) -> None:
        self.outer, self.name = outer, name


class Storage:
    """The data of a tensor, which torch.save keeps outside the pickle."""

    def __init__(self, array: np.ndarray, key: str, device: str = "cpu") -> None:
        self.array, self.key, self.device = array, key, device


class UntypedStorage(Storage):
    """The data of a tensor whose dtype has no storage class."""


class Pickler(pickle._Pickler):  # the one in Python, whose dispatch table can be extended
    dispatch = dict(pickle._Pickler.dispatch)

    def save_named(self, value: Global) -> None:
        self.write(pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode())

    def save_call(self, value: Call) -> None:
        self.save(value.target)
        self.save(value.arguments)
        self.write(pickle.REDUCE)
        if value.state is not None:
            self.save(value.state)
            self.write(pickle.BUILD)

    def save_member(self, value: Member) -> None:
        self.save(Global("__builtin__", "getattr"))
        self.save((value.outer, value.name))
        self.write(pickle.REDUCE)

    def persistent_id(self, value: object) -> object:
        if isinstance(value, UntypedStorage):
            return ("storage", Global("torch.storage", "UntypedStorage"), value.key, value.device, value.array.nbytes)
        if isinstance(value, Storage):
            return ("storage", Global("torch", STORAGES[value.array.dtype]), value.key, value.device, value.array.size)
        return None

    dispatch[Global] = save_named
    dispatch[Call] = save_call
    dispatch[Member] = save_member


def pickled(value: object) -> bytes:
    out = io.BytesIO()
    Pickler(out, protocol=2).dump(value)
    return out.getvalue()


def size(*lengths: int) -> Call:
    return Call("torch", "Size", (tuple(lengths),))


def archive(value: object, arrays: list[np.ndarray], name: str = "archive") -> bytes:
    """A file of torch.save. `value`: bytes are the pickle itself."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as members:
        members.writestr(f"{name}/data.pkl", value if isinstance(value, bytes) else pickled(value))
        members.writestr(f"{name}/byteorder", "little")
        for i, array in enumerate(arrays):
            members.writestr(f"{name}/data/{i}", array.tobytes())
    return out.getvalue()


HOOKS = Call("collections", "OrderedDict")


def tensor(array: np.ndarray, key: str, strides: tuple[int, ...] | None = None) -> Call:
    """A tensor whose storage has the key `key`."""
    own = tuple(step // array.itemsize for step in array.strides)
    return Call(
        "torch._utils",
        "_rebuild_tensor_v2",
        (Storage(array, key), 0, array.shape, own if strides is None else strides, False, HOOKS),
    )


def wrapper(kind: Global, dtype: str, shape: tuple[int, ...], state: object) -> Call:
    """A tensor of a class that wraps others."""
    layout, device = Call("torch.serialization", "_get_layout", ("torch.strided",)), Call("torch", "device", ("cpu",))
    return Call(
        "torch._tensor",
        "_rebuild_from_type_v2",
        (
            Global("torch._utils", "_rebuild_wrapper_subclass"),
            kind,
            (kind, Global("torch", dtype), shape, (1,) * len(shape), 0, layout, device, False),
            state,
        ),
    )


def dtensor(
    local: np.ndarray,
    key: str,
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    coordinates: tuple[int, ...] | None,
    *placements: Call,
) -> Call:
    """What a rank at `coordinates` of a mesh saves of a DTensor of this shape."""
    axes = tuple(
        Call("torch.distributed._mesh_layout", "_FlatLayout", (), {"shape": (size,), "stride": (1,)}) for size in mesh
    )
    device_mesh = Call(
        "torch.distributed.device_mesh",
        "DeviceMesh",
        (),
        {
            "_layout": Call("torch.distributed._mesh_layout", "_MeshLayout", (), {"axes": axes}),
            "_coordinate_on_dim": coordinates,
        },
    )
    spec = Call(
        "torch.distributed.tensor._dtensor_spec", "DTensorSpec", (), {"mesh": device_mesh, "placements": placements}
    )
    return wrapper(
        Global("torch.distributed.tensor", "DTensor"),
        DTYPES[local.dtype],
        shape,
        (None, {"_local_tensor": tensor(local, key), "_spec": spec}),
    )


def placement(name: str, **state: int) -> Call:
    """Shard, dim=0; _StridedShard, dim=0, split_factor=2; Replicate."""
    return Call("torch.distributed.tensor.placement_types", name, (), state)


SHARDED = "torch.distributed._shard"


def sharded_tensor(
    shards: list[tuple[np.ndarray, str, tuple[int, ...]]], shape: tuple[int, ...], dtype: str = "float32"
) -> Call:
    """What a rank of FSDP1 saves of a ShardedTensor. `shards`: the arrays of this rank, the keys of their
    storages, their offsets."""

    def shard(array: np.ndarray, key: str, offsets: tuple[int, ...]) -> Call:
        metadata = Call(
            f"{SHARDED}.metadata",
            "ShardMetadata",
            (),
            (None, {"shard_offsets": list(offsets), "shard_sizes": list(array.shape)}),
        )
        return Call(
            f"{SHARDED}.sharded_tensor.shard", "Shard", (), (None, {"tensor": tensor(array, key), "metadata": metadata})
        )

    kind = Global(f"{SHARDED}.sharded_tensor.api", "ShardedTensor")
    group = Member(kind, "ProcessGroupState")
    return wrapper(kind, dtype, shape, ([shard(*each) for each in shards], None, group, None, False))


def with_attributes(plain: Call, kind: Global | None = None, state: object = None) -> Call:
    """A tensor with an attribute, as FSDP1's full state dicts have."""
    return Call(
        "torch._tensor",
        "_rebuild_from_type_v2",
        (plain.target, kind or Global("torch", "Tensor"), plain.arguments, state or {"_has_been_cloned": True}),
    )


class Dcp:
    """A checkpoint of torch.distributed.checkpoint in a folder: add chunks, then write()."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.items, self.places, self.files = folder, {}, [], {}
        self.version: object = "1.0.0"

    def _place(self, name: str, offset: tuple[int, ...] | None, file: str, data: bytes, **info: object) -> None:
        begin = len(self.files.get(file, b""))
        self.files[file] = self.files.get(file, b"") + data
        index = Call(
            METADATA,
            "MetadataIndex",
            (),
            {"fqn": name, "index": 0} | ({"offset": size(*offset)} if offset is not None else {"offset": None}),
        )
        self.places.append(
            (
                index,
                Call(
                    "torch.distributed.checkpoint.filesystem",
                    "_StorageInfo",
                    (),
                    {"relative_path": file, "offset": begin, "length": len(data)} | info,
                ),
            )
        )

    def chunk(
        self,
        name: str,
        shape: tuple[int, ...],
        offset: tuple[int, ...],
        array: np.ndarray,
        file: str = "__0_0.distcp",
        **info: object,
    ) -> None:
        """A box of tensor `name`, at `offset`."""
        if name not in self.items:
            properties = Call(
                METADATA, "TensorProperties", (), (Global("torch", DTYPES[array.dtype]), None, False, None, False)
            )
            self.items[name] = Call(
                METADATA, "TensorStorageMetadata", (), {"properties": properties, "size": size(*shape), "chunks": []}
            )
        self.items[name].state["chunks"].append(
            Call(METADATA, "ChunkStorageMetadata", (), {"offsets": size(*offset), "sizes": size(*array.shape)})
        )
        self._place(name, offset, file, archive(tensor(array, "0"), [array]), **info)

    def whole(self, tensors: dict[str, np.ndarray]) -> Dcp:
        """Tensors in one chunk each."""
        for name, array in tensors.items():
            self.chunk(name, array.shape, (0,) * array.ndim, array)
        return self

    def object(self, name: str, data: bytes, file: str = "__0_0.distcp") -> None:
        self.items[name] = Call(METADATA, "BytesStorageMetadata")
        self._place(name, None, file, data)

    def write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, data in self.files.items():
            (self.folder / name).write_bytes(data)
        # Keys of storage_data cannot be hashed here: the dictionary is written item by item.
        places = Call("collections", "OrderedDict")
        out = io.BytesIO()
        pickler = Pickler(out, protocol=2)
        out.write(pickle.PROTO + b"\x02")
        pickler.save(Global(METADATA, "Metadata"))
        out.write(pickle.EMPTY_TUPLE + pickle.REDUCE + pickle.EMPTY_DICT + pickle.MARK)
        for key, value in (("state_dict_metadata", self.items), ("planner_data", None), ("version", self.version)):
            pickler.save(key)
            pickler.save(value)
        pickler.save("storage_data")
        pickler.save(places)
        out.write(pickle.MARK)
        for index, info in self.places:
            pickler.save(index)
            pickler.save(info)
        out.write(pickle.SETITEMS + pickle.SETITEMS + pickle.BUILD + pickle.STOP)
        (self.folder / ".metadata").write_bytes(out.getvalue())


def safetensors(path: Path, tensors: dict[str, np.ndarray], offsets: dict[str, list[int]] | None) -> None:
    """A file as HuggingFaceStorageWriter(save_distributed=True) writes it; without `offsets` a plain one."""
    kinds = {"float32": "F32", "int64": "I64", "uint8": "U8"}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    if offsets is not None:
        header["__metadata__"] |= {
            "DCP_VERSION": "1.0",
            "DCP_SHARDING_INFO": json.dumps({name: {"saved_offsets": at} for name, at in offsets.items()}),
        }
    data = b""
    for name, array in tensors.items():
        header[name] = {
            "dtype": kinds[str(array.dtype)],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + array.nbytes],
        }
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
