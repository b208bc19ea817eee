"""A checked safetensors file mapped read-only, and its tensors as views of the mapping.

The views cost no memory of their own: their pages are the file's pages in the page cache, shared with every process
that maps the same file and dropped by the kernel under pressure. Nothing may write into them: the mapping is PROT_READ,
so a write is a crash, never a changed weight.
"""

import mmap
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from sojourn.inference.loading import errors
from sojourn.inference.loading.errors import WeightsError
from sojourn.inference.loading.safetensors_file import FileIdentity, SafetensorsFile, TensorInfo

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64,
    "F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MappedRange:
    """Where one tensor lies in this process and in its file.

    Attributes:
        address: Its first byte in this process.
        length: Its bytes.
        device, inode: Of the file.
        offset: Its first byte in the file.
    """

    address: int
    length: int
    device: int
    inode: int
    offset: int


class MappedFile:
    """A read-only mapping of a checked file.

    Tensors handed out keep the mapping alive; `close` gives up this object's own hold on it, and the kernel unmaps it
    when the last tensor is gone.

    Attributes:
        file: The checked file.
    """

    def __init__(self, file: SafetensorsFile) -> None:
        self.file = file
        with file.path.open("rb") as opened:
            _check_unchanged(file, FileIdentity.of(os.fstat(opened.fileno())))
            self._map: mmap.mmap | None = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
        # Slices of this view are what tensors hold: while one lives, the mapping has an exported buffer and cannot be
        # unmapped beneath it. (A tensor made from the mmap object itself would not keep it mapped.)
        self._view: memoryview | None = memoryview(self._map)
        self._address = _address_of(self._view)

    def range_of(self, name: str) -> MappedRange:
        """Says where tensor `name` lies."""
        info = self.file.tensors[name]
        offset = self.file.data_offset + info.begin
        identity = self.file.identity
        return MappedRange(
            address=self._address + offset,
            length=info.size_bytes,
            device=identity.device,
            inode=identity.inode,
            offset=offset,
        )

    def bytes_of(self, name: str) -> memoryview:
        """Returns the bytes of tensor `name` as a read-only view.

        Raises:
            ValueError: This mapping is closed.
        """
        if self._view is None:
            raise ValueError(f"{self.file.path} is no longer mapped")
        info = self.file.tensors[name]
        begin = self.file.data_offset + info.begin
        return self._view[begin : begin + info.size_bytes]

    def tensor(self, name: str) -> torch.Tensor:
        """Returns tensor `name` as a view of the mapping.

        A tensor whose first byte is not aligned to its dtype is copied: kernels may assume alignment. Writers pad the
        header to 8 bytes, so this is rare.

        Raises:
            WeightsError: torch has no such dtype.
            ValueError: This mapping is closed.
        """
        info = self.file.tensors[name]
        dtype = self._torch_dtype(info)
        if info.elements == 0:
            return torch.empty(info.shape, dtype=dtype)
        buffer = self.bytes_of(name)
        if self.range_of(name).address % dtype.itemsize:
            return torch.frombuffer(bytearray(buffer), dtype=dtype).view(info.shape)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(buffer, dtype=dtype).view(info.shape)

    def _torch_dtype(self, info: TensorInfo) -> torch.dtype:
        dtype = TORCH_DTYPES.get(info.dtype)
        if dtype is None:
            raise WeightsError(
                errors.TENSOR_DTYPE_MISMATCH, self.file.path, f"tensor {info.name!r}",
                expected=f"one of {', '.join(TORCH_DTYPES)}", found=info.dtype, remedy="convert the checkpoint",
            )  # fmt: skip
        return dtype

    def close(self) -> None:
        """Gives up the hold on the mapping. Safe at any time, any number of times."""
        self._view = None
        if self._map is not None:
            mapping, self._map = self._map, None
            try:
                mapping.close()
            except BufferError:
                return  # tensors are alive; the mapping goes with the last of them


def _check_unchanged(file: SafetensorsFile, now: FileIdentity) -> None:
    """Refuses a file that is no longer the one that was checked."""
    if now != file.identity:
        raise WeightsError(
            errors.WEIGHTS_CHANGED, file.path, "the weight file since its header was read",
            expected=f"{file.identity.size} bytes, inode {file.identity.inode}",
            found=f"{now.size} bytes, inode {now.inode}", remedy="let the download finish, then start again",
        )  # fmt: skip


def _address_of(view: memoryview) -> int:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(view, dtype=torch.uint8).data_ptr()
