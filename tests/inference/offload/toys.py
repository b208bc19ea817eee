"""Small modules with the oddities that real ones have."""

import mmap
import tempfile

import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WIDTH = 16


class Layer(nn.Module):
    """A linear layer, a norm in another dtype, a transposed weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.transposed = nn.Parameter(torch.randn(WIDTH, WIDTH).t() / WIDTH)
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, x):
        x = x + self.inner(x.to(torch.bfloat16)).to(x.dtype) * self.scale + self.shift
        return torch.tanh(linear(x, self.transposed) + x)


class Stack(nn.Module):
    """Layers in a list, called in any order, with weights around them."""

    def __init__(self, layers: int, order=None) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Layer() for _ in range(layers))
        self.order = range(layers) if order is None else order

    def forward(self, x):
        x = self.embed(x)
        for i in self.order:
            x = self.blocks[i](x)
        return x


def tied(layers: int = 4) -> Stack:
    """Layer 1 uses layer 0's weight, layer 3 a part of layer 2's, and layer 2's scale is the embedding's bias."""
    model = Stack(layers)
    model.blocks[1].inner.weight = model.blocks[0].inner.weight
    pool = torch.randn(WIDTH * 3)
    model.blocks[2].scale = nn.Parameter(pool[:WIDTH])
    model.blocks[3].scale = nn.Parameter(pool[WIDTH // 2 : WIDTH // 2 + WIDTH])
    model.embed.bias = nn.Parameter(model.blocks[0].scale.data)
    return model


def on_a_mapping(model: nn.Module) -> nn.Module:
    """The same model with every parameter in a read-only file mapping, at odd addresses."""
    with tempfile.TemporaryFile() as file:
        places, by_parameter = {}, {}
        for name, parameter in model.named_parameters():
            file.write(b"\0" * 8)
            places[name] = file.tell()
            by_parameter[name] = parameter
            flat = parameter.data.t() if parameter.dim() == 2 and not parameter.is_contiguous() else parameter.data
            file.write(flat.contiguous().view(torch.uint8).numpy().tobytes())
            file.write(b"\0" * (-file.tell() % 8))
        file.flush()
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    for name, place in places.items():
        parameter = by_parameter[name]
        size = parameter.numel() * parameter.element_size()
        flat = torch.frombuffer(memoryview(mapping)[place : place + size], dtype=parameter.dtype)
        shaped = flat.view(tuple(reversed(parameter.shape)) if not parameter.is_contiguous() else parameter.shape)
        parameter.data = shaped if parameter.is_contiguous() else shaped.t()
    return model


class Reads(TorchDispatchMode):
    """Tells recording streams of every tensor that any operation takes in, by whoever it is issued."""

    def __init__(self, streams) -> None:
        super().__init__()
        self.streams = streams

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for leaf in tree_leaves((args, kwargs or {})):
            if isinstance(leaf, torch.Tensor) and not _is_move(function):
                self.streams.read(leaf)
        return function(*args, **(kwargs or {}))


def _is_move(function) -> bool:
    """Views and copies move no weight into a computation."""
    return function._schema.name in {
        "aten::view",
        "aten::as_strided",
        "aten::slice",
        "aten::copy_",
        "aten::detach",
        "aten::alias",
        "aten::t",
        "aten::empty",
        "aten::set_",
        "aten::view.dtype",
        "aten::_to_copy_window",
    }
