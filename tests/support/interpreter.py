"""Triton's interpreter as the tests use it: kernels run on the CPU, operation by operation, in numpy.

What it computes stays what Triton computes; what is changed here is how long it takes (most of it goes into types and
shapes that are made anew at every operation, not into numbers) and how it rounds to bfloat16.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

import numpy as np


@contextmanager
def interpreting() -> Iterator[None]:
    """numpy warns of every infinity, which kernels meet on purpose; and see ``_quickened`` and ``_rounded``."""
    if find_spec("triton"):
        _quickened()
        _remembered()
        _compared_at_once()
        _told_apart_by_type()
        _called_at_once()
        _sized_at_once()
        _checked_in_numpy()
        _rounded()
        _indexed()
        _read()
    with np.errstate(all="ignore"):
        yield


@cache
def _read() -> None:
    """Reads the source of every kernel now.

    The interpreter does so at a function's first call, by line numbers of when it was imported: a file that is edited
    while tests run would give ``KeyError`` and the name of a function.
    """
    import_module("attemper.backends.triton")
    from triton.runtime.interpreter import InterpretedFunction

    for name, module in list(sys.modules.items()):
        if name.startswith("attemper.backends.triton"):
            for value in list(vars(module).values()):
                if isinstance(value, InterpretedFunction):
                    value.rewrite()


@cache
def _quickened() -> None:
    """Takes out a repeated search of the interpreter: half of its time.

    At every call of one jit function by another it looks through ``triton.language`` for functions to replace, all of
    which the first call from the same module has replaced.
    """
    from triton.runtime import interpreter

    call, known = interpreter.InterpretedFunction.__call__, set()

    def quick(self: interpreter.InterpretedFunction, *args: object, **kwargs: object) -> object:
        if self.fn.__module__ in known:
            return self.rewrite()(*args, **kwargs)
        known.add(self.fn.__module__)
        return call(self, *args, **kwargs)

    interpreter.InterpretedFunction.__call__ = quick


@cache
def _remembered() -> None:
    """Types and shapes are made once: they follow from what they are made of, and nothing changes them afterwards."""
    import triton.language as tl
    from triton.runtime import interpreter

    module: Any = interpreter
    numpy_type, by_name = module._get_np_dtype, dict[str, Any]()

    def of_known_name(kind: Any) -> Any:
        name = str(kind)
        if name not in by_name:
            by_name[name] = numpy_type(kind)
        return by_name[name]

    module._get_np_dtype = of_known_name
    _once_per_argument(tl.block_type)
    given, of_scalars = tl.tensor.__init__, list[Any]()

    def of_known_shape(self: Any, handle: Any, type: Any) -> None:
        sizes = type.sizes if type.is_block() else of_scalars
        if not sizes:
            given(self, handle, type)
            sizes += [self.numel, self.shape]
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = sizes

    cast(Any, tl.tensor).__init__ = of_known_shape


def _once_per_argument(kind: Any) -> None:
    """A second ``kind(element, shape)`` has the attributes of the first, and makes none of them; nor does a second
    ``with_element_ty``. ``sizes`` are filled by the first tensor of the type."""
    given, other = kind.__init__, kind.with_element_ty
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def once(self: Any, element: Any, shape: Any) -> None:
        named = (element.name, element.const, element.address_space) if element.is_ptr() else element.name
        key = (named, *getattr(shape, "values", shape))
        if key not in known:
            given(self, element, shape)
            known[key] = vars(self) | {"sizes": [], "others": {}}
        vars(self).update(known[key])

    def with_element(self: Any, element: Any) -> Any:
        if element.is_ptr():
            return other(self, element)
        if element.name not in self.others:
            self.others[element.name] = other(self, element)
        return self.others[element.name]

    kind.__init__, kind.with_element_ty = once, with_element


@cache
def _compared_at_once() -> None:
    """Operands of one shape, and one type beside itself, are most of what is compared: both are seen without a loop."""
    import triton.language as tl
    from triton.language import semantic

    kinds, rules = cast(Any, tl.dtype), cast(Any, semantic.TritonSemantic)
    equal, broadcast = kinds.__eq__, rules.broadcast_impl_value

    def same(self: Any, other: Any) -> bool:
        return self is other or equal(self, other)

    def of_one_shape(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block():
            if left.shape.values == right.shape.values:
                return lhs, rhs
        elif not left.is_block() and not right.is_block():
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    kinds.__eq__, rules.broadcast_impl_value = same, of_one_shape


@cache
def _told_apart_by_type() -> None:
    """Two operands of one type need no common one; what has nothing inside needs no search for constants in it."""
    import triton.language as tl
    from triton.language import semantic

    core, rules = cast(Any, tl.core), cast(Any, semantic.TritonSemantic)
    inside, common, constant = core._unwrap_if_constexpr, rules.binary_op_type_checking_impl, rules.scalar_constant
    whole = {tl.tensor, tl.dtype, core.block_type, core.pointer_type, int, float, bool, str, type(None)}
    wide = {"int1", "int32", "uint32", "int64", "uint64", "fp32", "fp64"}
    numbers = (int, float, bool)
    constants: dict[tuple[Any, ...], Any] = {}
    blocks: dict[tuple[Any, ...], Any] = {}

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind in whole:
            return value
        return value.value if kind is tl.constexpr else inside(value)

    def of_one_type(self: Any, lhs: Any, rhs: Any, *rules: Any, **named: Any) -> tuple[Any, Any]:
        left, right = type(lhs), type(rhs)
        if left is right is tl.tensor:
            if lhs.dtype.name == rhs.dtype.name and lhs.dtype.name in wide:
                return self.broadcast_impl_value(lhs, rhs)
        elif left is tl.tensor and right in numbers and not named and lhs.dtype.name in wide:
            key = (lhs.type.name, right, rhs or str(rhs), rules)  # 0.0 is no -0.0
            if key in blocks:
                return lhs, blocks[key]
            one, other = common(self, lhs, rhs, *rules)
            if one is lhs:
                blocks[key] = other
            return one, other
        return common(self, lhs, rhs, *rules, **named)

    def known_constant(self: Any, value: Any, dtype: Any) -> Any:
        key = (value or str(value), type(value), dtype.name)
        if key not in constants:
            constants[key] = constant(self, value, dtype)
        return constants[key]

    core._unwrap_if_constexpr = unwrapped
    rules.binary_op_type_checking_impl, rules.scalar_constant = of_one_type, known_constant


@cache
def _called_at_once() -> None:
    """Functions of the language are given the interpreter's rules without a look at whether there are any."""
    from triton.runtime import interpreter

    module: Any = interpreter

    def patched(holder: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function, rules = getattr(member, "__wrapped__", member), module.interpreter_semantic

        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = rules
            return function(*args, **named)

        scope.set_attr(holder, name, call)

    module._patch_attr = patched


@cache
def _sized_at_once() -> None:
    """Numbers are held to fit their type, as the interpreter does it, in one comparison."""
    import triton.language as tl
    from triton.runtime import interpreter

    handle: Any = interpreter.TensorHandle
    check = handle.__post_init__

    def sized(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if type(dtype) is not tl.dtype or data.itemsize * 8 > dtype.primitive_bitwidth:
            check(self)

    handle.__init__ = sized


@cache
def _checked_in_numpy() -> None:
    """Sums and products of int32 are held to fit, as the interpreter does it, by one operation instead of a dozen."""
    from triton.language import semantic

    exact: dict[str, Any] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def fits(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
        kind = lhs.type.scalar
        if kind.int_bitwidth >= 64:
            return
        result = exact[operation.__name__](lhs.handle.data, rhs.handle.data, dtype=np.int64)
        low, high = kind.get_int_min_value(), kind.get_int_max_value()
        if result.size and not low <= result.min() <= result.max() <= high:
            raise OverflowError(f"int{kind.int_bitwidth} overflow detected for operation {operation.__name__}")

    cast(Any, semantic.TritonSemantic).binary_op_sanitize_overflow_impl = fits


@cache
def _rounded() -> None:
    """float32 goes to bfloat16 by rounding to nearest, as on every machine: the interpreter cuts the digits off."""
    import triton.language as tl
    from triton.runtime import interpreter

    given = interpreter.InterpreterBuilder.cast_impl

    def nearest(self: interpreter.InterpreterBuilder, src: interpreter.TensorHandle, kind: tl.dtype) -> object:
        if (src.dtype.scalar, kind.scalar) != (tl.float32, tl.bfloat16):
            return given(self, src, kind)
        bits = np.ascontiguousarray(src.data).view(np.uint32)
        even = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return interpreter.TensorHandle(np.where(np.isnan(src.data), np.uint16(0x7FC0), even), kind.scalar)

    cast(Any, interpreter.InterpreterBuilder).cast_impl = nearest


@cache
def _indexed() -> None:
    """A number that a kernel counts with becomes Python's by ``item``: Triton 3.6 (interpreter.py:888) calls ``int``
    on an array of one element, which numpy 2.4 no longer allows."""
    from triton.runtime import interpreter

    module: Any = interpreter
    given = module._patch_lang_tensor

    def patched(tensor: Any, *scope: Any) -> None:
        given(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    module._patch_lang_tensor = patched
