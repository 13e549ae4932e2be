"""Reading of a module's own `forward`, if it is straight-line code.

The source is read as an AST. It may hold assignments to local names and a return. Expressions are calls (of submodules,
tensor methods, and the torch functions in `_FUNCTIONS`), arithmetic, and indexing of the last dimension. They may read
parameters, buffers and numeric attributes. Tracing isn't enough: it turns a branch on a random number into
a constant. A new function needs an entry in `_FUNCTIONS`.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from gleanrl._rollout.native_modules import Emitter, Results, chunk, parameter
from gleanrl._rollout.native_program import BinaryFunction, NotNative, UnaryFunction, Value

functional = torch.nn.functional

_FUTURES = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
"""The flags of a function's file that change its code."""


@dataclass(frozen=True)
class Parameter:
    """A parameter or buffer that the code reads."""

    module: nn.Module
    name: str


def run_forward(
    emit: Emitter, module: nn.Module, inputs: Sequence[Value], names: Sequence[str] | None = None
) -> Results:
    """Return the results of a module's own `forward`.

    Args:
        emit: emits the operations.
        module: the module.
        inputs: the arguments.
        names: the names of the arguments; None for positional ones.

    Raises:
        NotNative: the code isn't straight-line code, or has an operation that the core doesn't compute.
    """
    forward = type(module).forward
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        raise NotNative(f"the forward of {type(module).__name__} isn't a plain function")
    tree = _tree_of(forward, forward.__code__)
    own, *parameters = _parameters_of(tree)
    arguments = parameters[: len(inputs)] if names is None else list(names)
    if len(parameters) != len(inputs) or sorted(arguments) != sorted(parameters):
        raise NotNative(f"the forward of {type(module).__name__} has other parameters than inputs")
    reader = _ForwardReader(emit, forward, {own: module, **dict(zip(arguments, inputs, strict=True))})
    for statement in tree.body[:-1]:
        reader.execute(statement)
    last = tree.body[-1]
    if not isinstance(last, ast.Return) or last.value is None:
        raise NotNative(f"the forward of {type(module).__name__} doesn't end with a return")
    return reader.results(last.value)


def _parameters_of(tree: ast.FunctionDef) -> list[str]:
    arguments = tree.args
    if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.defaults:
        raise NotNative("a forward with optional or variable parameters")
    return [one.arg for one in (*arguments.posonlyargs, *arguments.args)]


@lru_cache(maxsize=256)
def _tree_of(forward: FunctionType, code: CodeType) -> ast.FunctionDef:
    """Return the AST of a function; raise `NotNative` if its source can't be read or isn't the code that runs.

    `code` is the function's code, which may be exchanged in place.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError) as cause:
        raise NotNative("the source of forward can't be read") from cause
    function = tree.body[0] if len(tree.body) == 1 else None
    if not isinstance(function, ast.FunctionDef) or function.decorator_list:
        raise NotNative("forward is decorated or isn't a function")
    # The file may have changed since its import. Calls on names that a file imports compile to other code.
    modules = [name for name in code.co_names if _is_module(forward.__globals__.get(name))]
    imports: list[ast.stmt] = [ast.Import([ast.alias(name)]) for name in modules]
    if not any(_same_code(_compiled([*lines, function], code), code) for lines in (imports, [])):
        raise NotNative("the source of forward isn't the code that runs")
    return function


def _is_module(value: Any) -> bool:
    return isinstance(value, ModuleType)


def _compiled(lines: list[ast.stmt], original: CodeType) -> CodeType:
    """Return the code of the function in `lines`, compiled with the options of the file of the `original` code."""
    tree = ast.fix_missing_locations(ast.Module(lines, []))
    flags = original.co_flags & _FUTURES
    compiled = compile(tree, "<forward>", "exec", flags, dont_inherit=True)
    return next(one for one in compiled.co_consts if isinstance(one, CodeType))


def _same_code(a: CodeType, b: CodeType) -> bool:
    names = ("co_code", "co_consts", "co_names", "co_varnames", "co_freevars")
    return all(getattr(a, name) == getattr(b, name) for name in names)


class _ForwardReader:
    """Executes statements on symbolic values.

    Args:
        emit: emits the operations.
        function: the function whose global names are read.
        names: the local names.
    """

    def __init__(self, emit: Emitter, function: FunctionType, names: dict[str, Any]) -> None:
        self._emit, self._function, self._names = emit, function, names

    def execute(self, statement: ast.stmt) -> None:
        """Execute an assignment or a docstring; raise `NotNative` for any other statement."""
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return
        targets: Sequence[ast.expr] = ()
        if isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets, expression = [statement.target], statement.value
        elif isinstance(statement, ast.Assign):
            targets, expression = statement.targets, statement.value
        if len(targets) != 1:
            raise NotNative(f"line {statement.lineno} of forward isn't an assignment of a value")
        (target,) = targets
        value = self._value(expression)
        if isinstance(target, ast.Name):
            self._names[target.id] = value
        elif isinstance(target, ast.Tuple) and isinstance(value, tuple) and len(target.elts) == len(value):
            for one, part in zip(target.elts, value, strict=True):
                if not isinstance(one, ast.Name):
                    raise NotNative(f"line {statement.lineno} of forward assigns to more than names")
                self._names[one.id] = part
        else:
            raise NotNative(f"line {statement.lineno} of forward assigns to more than names")

    def results(self, expression: ast.expr) -> Results:
        """Return the values of a returned expression."""
        found = self._value(expression)
        parts = found if isinstance(found, tuple) else (found,)
        return tuple(map(self._tensor, parts))

    def _value(self, node: ast.expr) -> Any:
        read = _READERS.get(type(node))
        if read is None:
            raise NotNative(f"line {node.lineno} of forward has a {type(node).__name__}")
        return read(self, node)

    def _tensor(self, value: Any) -> Value:
        """Return a symbolic tensor; a parameter becomes a constant of the program."""
        if isinstance(value, Parameter):
            tensor = getattr(value.module, value.name)
            return self._emit.builder.constant(parameter(value.module, value.name), tuple(tensor.shape))
        if not isinstance(value, Value):
            raise NotNative(f"a {type(value).__name__} where a tensor is needed")
        return value

    # ----------------------------------------------------------- expressions
    def _name(self, node: ast.Name) -> Any:
        if node.id in self._names:
            return self._names[node.id]
        if node.id in self._function.__code__.co_freevars or node.id not in self._function.__globals__:
            raise NotNative(f"forward reads {node.id!r}, which is neither its own nor global")
        self._emit.names.append((self._function.__globals__, node.id))
        found = self._function.__globals__[node.id]
        if not isinstance(found, ModuleType) and not _is_known(found):
            raise NotNative(f"forward reads the global {node.id!r}")
        return found

    def _attribute(self, node: ast.Attribute) -> Any:
        base, name = self._value(node.value), node.attr
        if isinstance(base, nn.Module) and not hasattr(type(base), name):
            noted = self._emit.modules.setdefault(base, set())
            if noted is not None:
                noted.add(name)
            if name in vars(base):
                number = vars(base)[name]
                if type(number) in (int, float):
                    return number
            elif name in base._parameters or name in base._buffers:
                return None if getattr(base, name) is None else Parameter(base, name)
            elif name in base._modules:
                return base._modules[name]
        elif isinstance(base, ModuleType) and base in (torch, torch.nn, functional):
            self._emit.names.append((vars(base), name))
            return getattr(base, name, None)
        raise NotNative(f"forward reads the attribute {name!r} of a {type(base).__name__}")

    def _call(self, node: ast.Call) -> Any:
        arguments = [self._value(one) for one in node.args]
        if any(one.arg is None for one in node.keywords):
            raise NotNative("forward passes on keywords")
        named = {str(one.arg): self._value(one.value) for one in node.keywords}
        if isinstance(node.func, ast.Attribute) and (found := self._method(node.func)) is not None:
            value, function = found
            return self._applied(function, value, *arguments, **named)
        called = self._value(node.func)
        if isinstance(called, nn.Module):
            if named:
                raise NotNative("forward calls a module with keywords")
            results = self._emit.call(called, list(map(self._tensor, arguments)))
            return results[0] if len(results) == 1 else results
        if _is_known(called):
            return self._applied(_FUNCTIONS[called], *arguments, **named)
        raise NotNative(f"forward calls {getattr(called, '__name__', type(called).__name__)!r}")

    def _applied(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        try:
            inspect.signature(function).bind(self, *arguments, **named)
        except TypeError as cause:
            raise NotNative(f"forward calls a function with arguments that aren't known: {cause}") from cause
        return function(self, *arguments, **named)

    def _method(self, node: ast.Attribute) -> tuple[Value, Callable[..., Any]] | None:
        """Return a tensor and its method; None if `node` isn't the method of a tensor."""
        if isinstance(node.value, ast.Name) and node.value.id not in self._names:
            return None  # a module such as torch, whose functions aren't methods
        value = self._value(node.value)
        if not isinstance(value, (Value, Parameter)):
            return None
        if node.attr not in _SHARED:
            raise NotNative(f"forward calls the tensor method {node.attr!r}")
        return self._tensor(value), _SHARED[node.attr]

    def _operation(self, node: ast.BinOp) -> Any:
        function = _OPERATORS.get(type(node.op))
        left, right = self._value(node.left), self._value(node.right)
        if isinstance(node.op, ast.Pow) and right == 2 and isinstance(left, (Value, Parameter)):
            return _multiply(self, left, left)
        if function is None:
            raise NotNative(f"forward has the operator {type(node.op).__name__}")
        return function(self, left, right)

    def _sign(self, node: ast.UnaryOp) -> Any:
        value = self._value(node.operand)
        if not isinstance(node.op, ast.USub):
            raise NotNative(f"forward has the operator {type(node.op).__name__}")
        if type(value) in (int, float):
            return -value
        return self._emit.builder.unary(UnaryFunction.NEGATE, self._tensor(value))

    def _subscript(self, node: ast.Subscript) -> Any:
        value = self._value(node.value)
        if isinstance(value, tuple) and isinstance(node.slice, (ast.Constant, ast.UnaryOp)):
            index = self._value(node.slice)
            if type(index) is int and -len(value) <= index < len(value):
                return value[index]
            raise NotNative("forward has an index that isn't a number")
        x, index = self._tensor(value), node.slice
        parts = index.elts if isinstance(index, ast.Tuple) else []
        of_last = len(parts) == 2 and isinstance(parts[0], ast.Constant) and parts[0].value is Ellipsis
        if not of_last or not x.shape:
            raise NotNative("forward indexes another dimension than the last one")
        last = parts[1]
        if not isinstance(last, ast.Slice):
            at = self._value(last)
            if type(at) is not int or not -x.shape[-1] <= at < x.shape[-1]:
                raise NotNative("forward has an index that isn't a number of the dimension")
            part = self._emit.builder.narrow(x, at % x.shape[-1], 1)
            return self._emit.builder.reshape(part, part.shape[:-1])
        bounds = [None if one is None else self._value(one) for one in (last.lower, last.upper, last.step)]
        if any(one is not None and type(one) is not int for one in bounds) or bounds[2] not in (None, 1):
            raise NotNative("forward has a slice that isn't of numbers with step 1")
        first, end, _ = slice(*bounds).indices(x.shape[-1])
        return self._emit.builder.narrow(x, first, max(end - first, 0))

    def _items(self, node: ast.Tuple | ast.List) -> Any:
        return tuple(map(self._value, node.elts))

    def _number(self, node: ast.Constant) -> Any:
        if node.value is None or type(node.value) in (int, float, bool):
            return node.value
        raise NotNative(f"forward has the constant {node.value!r:.40}")


_READERS: dict[type[ast.expr], Callable[[_ForwardReader, Any], Any]] = {
    ast.Name: _ForwardReader._name,
    ast.Attribute: _ForwardReader._attribute,
    ast.Call: _ForwardReader._call,
    ast.BinOp: _ForwardReader._operation,
    ast.UnaryOp: _ForwardReader._sign,
    ast.Subscript: _ForwardReader._subscript,
    ast.Tuple: _ForwardReader._items,
    ast.List: _ForwardReader._items,
    ast.Constant: _ForwardReader._number,
}


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _arithmetic(pair: BinaryFunction, on_right: UnaryFunction, on_left: UnaryFunction) -> Callable[..., Any]:
    """Return the operation of two tensors, or of a tensor and a number on its right or left."""

    def operate(reader: _ForwardReader, a: Any, b: Any) -> Any:
        builder = reader._emit.builder
        if _is_number(a) and _is_number(b):
            raise NotNative("forward computes with numbers alone")
        if _is_number(b):
            return builder.unary(on_right, reader._tensor(a), b)
        if _is_number(a):
            return builder.unary(on_left, reader._tensor(b), a)
        return builder.binary(pair, reader._tensor(a), reader._tensor(b))

    return operate


_add = _arithmetic(BinaryFunction.ADD, UnaryFunction.ADD, UnaryFunction.ADD)
_multiply = _arithmetic(BinaryFunction.MULTIPLY, UnaryFunction.MULTIPLY, UnaryFunction.MULTIPLY)
_divide = _arithmetic(BinaryFunction.DIVIDE, UnaryFunction.DIVIDE, UnaryFunction.DIVIDE_INTO)


def _subtract(reader: _ForwardReader, a: Any, b: Any) -> Any:
    if _is_number(b):
        return _add(reader, a, -b)
    return _arithmetic(BinaryFunction.SUBTRACT, UnaryFunction.ADD, UnaryFunction.SUBTRACT_FROM)(reader, a, b)


_OPERATORS: dict[type[ast.operator], Callable[..., Any]] = {
    ast.Add: _add,
    ast.Sub: _subtract,
    ast.Mult: _multiply,
    ast.Div: _divide,
}


def _unary(function: UnaryFunction) -> Callable[..., Value]:
    return lambda reader, x: reader._emit.builder.unary(function, reader._tensor(x))


def _last(dim: Any) -> None:
    if dim != -1 or type(dim) is not int:
        raise NotNative("an operation over another dimension than the last one (-1)")


def _with_numbers(function: UnaryFunction, **defaults: float) -> Callable[..., Value]:
    """Return the counterpart of an activation with these parameters, which must be numbers."""

    def emit_it(reader: _ForwardReader, x: Any, *arguments: Any, **named: Any) -> Value:
        names = [*defaults]
        numbers = {**defaults, **dict(zip(names, arguments, strict=False)), **named}
        if (
            len(arguments) > len(names)
            or set(numbers) != set(names)
            or not all(map(_is_number, numbers.values()))
        ):
            raise NotNative(f"{function.name} with other arguments than numbers for {names}")
        return reader._emit.builder.unary(function, reader._tensor(x), *numbers.values())

    return emit_it


def _clamp(reader: _ForwardReader, x: Any, min: Any = None, max: Any = None) -> Value:
    found = reader._tensor(x)
    for function, bound in ((UnaryFunction.AT_LEAST, min), (UnaryFunction.AT_MOST, max)):
        if bound is not None:
            if not _is_number(bound) or abs(bound) == inf:
                raise NotNative("clamp with bounds that aren't numbers")
            found = reader._emit.builder.unary(function, found, bound)
    return found


def _argmax(reader: _ForwardReader, x: Any, dim: Any = None, keepdim: bool = False) -> Value:
    _last(dim)
    index = reader._emit.builder.argmax(reader._tensor(x))
    return reader._emit.builder.reshape(index, (*index.shape, 1)) if keepdim else index


def _chunk(reader: _ForwardReader, x: Any, chunks: Any, dim: Any = 0) -> Results:
    _last(dim)
    if type(chunks) is not int:
        raise NotNative("chunk into a number of parts that isn't an integer")
    return chunk(reader._emit, reader._tensor(x), chunks)


def _split(reader: _ForwardReader, x: Any, split_size: Any, dim: Any = 0) -> Results:
    _last(dim)
    value = reader._tensor(x)
    if type(split_size) is not int or split_size < 1 or not value.shape:
        raise NotNative("split into parts whose size isn't an integer")
    if value.shape[-1] % split_size:
        raise NotNative("split into parts of different sizes")
    return chunk(reader._emit, value, value.shape[-1] // split_size)


def _cat(reader: _ForwardReader, tensors: Any, dim: Any = 0) -> Value:
    _last(dim)
    return reader._emit.builder.cat(list(map(reader._tensor, tensors)))


def _squeeze(reader: _ForwardReader, x: Any, dim: Any = None) -> Value:
    _last(dim)
    value = reader._tensor(x)
    one = value.shape[-1:] == (1,)
    return reader._emit.builder.reshape(value, value.shape[:-1]) if one else value


def _unsqueeze(reader: _ForwardReader, x: Any, dim: Any) -> Value:
    _last(dim)
    value = reader._tensor(x)
    return reader._emit.builder.reshape(value, (*value.shape, 1))


def _one_hot(reader: _ForwardReader, x: Any, num_classes: Any = -1) -> Value:
    if type(num_classes) is not int or num_classes < 1:
        raise NotNative("one_hot without a number of classes")
    return reader._emit.builder.one_hot(reader._tensor(x), num_classes)


def _linear(reader: _ForwardReader, x: Any, weight: Any, bias: Any = None) -> Value:
    if not isinstance(weight, Parameter) or not (bias is None or isinstance(bias, Parameter)):
        raise NotNative("linear with weights that aren't parameters")
    shape = getattr(weight.module, weight.name).shape
    if len(shape) != 2:
        raise NotNative("linear with weights that aren't a matrix")
    read = None if bias is None else parameter(bias.module, bias.name)
    return reader._emit.builder.dense(
        reader._tensor(x), parameter(weight.module, weight.name), read, shape[1], shape[0]
    )


def _pairwise(function: BinaryFunction) -> Callable[..., Value]:
    return lambda reader, x, other: reader._emit.builder.binary(
        function, reader._tensor(x), reader._tensor(other)
    )


_SHARED: dict[str, Callable[..., Any]] = {
    "tanh": _unary(UnaryFunction.TANH),
    "relu": _unary(UnaryFunction.RELU),
    "sigmoid": _unary(UnaryFunction.SIGMOID),
    "exp": _unary(UnaryFunction.EXP),
    "log": _unary(UnaryFunction.LOG),
    "abs": _unary(UnaryFunction.ABS),
    "sqrt": _unary(UnaryFunction.SQRT),
    "neg": _unary(UnaryFunction.NEGATE),
    "clamp": _clamp,
    "clamp_min": lambda reader, x, min: _clamp(reader, x, min),
    "clamp_max": lambda reader, x, max: _clamp(reader, x, None, max),
    "add": _add,
    "sub": _subtract,
    "mul": _multiply,
    "div": _divide,
    "argmax": _argmax,
    "chunk": _chunk,
    "split": _split,
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "maximum": _pairwise(BinaryFunction.MAXIMUM),
    "minimum": _pairwise(BinaryFunction.MINIMUM),
}
"""Operations that are both functions of torch and methods of tensors."""

_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **{getattr(torch, name): function for name, function in _SHARED.items()},
    torch.cat: _cat,
    functional.linear: _linear,
    functional.one_hot: _one_hot,
    functional.relu: _unary(UnaryFunction.RELU),
    functional.tanh: _unary(UnaryFunction.TANH),
    functional.sigmoid: _unary(UnaryFunction.SIGMOID),
    functional.silu: _unary(UnaryFunction.SILU),
    functional.gelu: _unary(UnaryFunction.GELU),
    functional.elu: _with_numbers(UnaryFunction.ELU, alpha=1.0),
    functional.leaky_relu: _with_numbers(UnaryFunction.LEAKY_RELU, negative_slope=0.01),
    functional.softplus: _with_numbers(UnaryFunction.SOFTPLUS, beta=1.0, threshold=20.0),
}
"""Functions of torch by identity, and their counterparts on symbolic values."""


def _is_known(value: Any) -> bool:
    try:
        return value in _FUNCTIONS
    except TypeError:  # it can't be hashed
        return False
