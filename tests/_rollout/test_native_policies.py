"""Modules, parameters and modes that the core doesn't compute fall back to torch; changes take effect."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gleanrl._arrays.schema import Field
from gleanrl._rollout.native_policies import reason_for_torch
from gleanrl.errors import PolicyError, UnsupportedError
from tests._rollout.test_native_forward import Network, loaded, network
from tests._rollout.test_native_modules import Setting, floats, module, noise

X = {("x",): noise(3, 4)}
Y = {("y",): floats(4)}


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def played(net: nn.Module, roots: Any = X, written: Any = Y, **options: Any) -> Setting:
    """Return a setting after a block whose values are torch's."""
    setting = Setting(module(net), roots, written, **options)
    require_torch(setting)
    return setting


def require_torch(setting: Setting) -> None:
    mine, theirs = setting.play(), setting.by_torch()
    for path, column in mine.items():
        near = torch.allclose(column, theirs[path], atol=1e-5, equal_nan=True)
        assert column.shape == theirs[path].shape and near, (setting.said, column, theirs[path])


# ------------------------------------------------------------------------------------------------- at the first plan
class Scaled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


class OwnCall(nn.Linear):
    def __call__(self, *inputs: Any) -> Any:
        return -super().__call__(*inputs)


class RareCall(nn.Linear):
    """Differs from its forward only for values that no comparison sees."""

    def __call__(self, *inputs: Any) -> Any:
        y = super().__call__(*inputs)
        return y * 3 if 3e5 < float(inputs[0].abs().max()) < 4e5 else y


class RareNetwork(Network):
    """Differs from its straight-line forward only for values that no comparison sees."""

    def __call__(self, *inputs: Any) -> Any:
        y = super().__call__(*inputs)
        return y * 3 if 3e5 < float(inputs[0].abs().max()) < 4e5 else y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


class RareParts(Network):
    """Finds another submodule in every third read."""

    reads = 0

    def __getattr__(self, name: str) -> Any:
        if name == "act":
            type(self).reads += 1
        return super().__getattr__("fc" if name == "act" and self.reads > 10**6 else name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x)


class Half(nn.Parameter):
    """A parameter of another class."""


class Wrapped(torch.Tensor):
    """A tensor of another class."""


def changed(change: Callable[[nn.Sequential], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        net = mlp()
        return change(net) or net

    return make


def set_weight(make: Callable[[torch.Tensor], Any]) -> Callable[[], nn.Module]:
    """Return a function that makes a network whose first weight is replaced."""

    def change(net: nn.Sequential) -> None:
        first: Any = net[0]
        value = make(first.weight.detach())
        if not isinstance(value, nn.Parameter):
            del first.weight
        first.weight = value

    return changed(change)


def old_style(function: Callable[..., Any]) -> Callable[[nn.Sequential], None]:
    def change(net: nn.Sequential) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function(net[0])

    return change


def training(net: nn.Sequential) -> nn.Sequential:
    net.append(nn.Dropout(0.0))
    return net.train()


class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        nets = [mlp(), mlp()]
        self.params, _ = torch.func.stack_module_state(nets)
        self.net = nets[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda p, x: torch.func.functional_call(self.net, p, (x,)), (0, None))(
            self.params, x
        )[0]


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.held = TensorDict.from_module(self.net).data.clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.held.to_module(self.net):
            return self.net(x)


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "subclass of Linear": lambda: Scaled(4, 4),
    "subclass with its own call": lambda: OwnCall(4, 4),
    "subclass with a call that differs rarely": lambda: RareCall(4, 4),
    "network with a call that differs rarely": RareNetwork,
    "network with its own look-up of parts": RareParts,
    "replaced forward on an instance": changed(lambda net: setattr(net[0], "forward", lambda x: noise(8) + 0 * x[0])),
    "replaced forward on an activation": changed(lambda net: setattr(net[1], "forward", torch.relu)),
    "replaced forward on the sequence": changed(lambda net: setattr(net, "forward", lambda x: 2 * net[2](net[0](x)))),
    "parametrization": changed(
        lambda net: parametrize.register_parametrization(net[0], "weight", nn.Identity()) and None
    ),
    "weight_norm": changed(lambda net: parametrizations.weight_norm(net[0]) and None),
    "spectral_norm": changed(lambda net: parametrizations.spectral_norm(net[0]).eval() and None),
    "orthogonal": changed(lambda net: parametrizations.orthogonal(net[0]) and None),
    "old weight_norm": changed(old_style(torch.nn.utils.weight_norm)),
    "old spectral_norm": changed(lambda net: old_style(torch.nn.utils.spectral_norm)(net) or net.eval()),
    "forward hook": changed(lambda net: net[0].register_forward_hook(lambda m, i, o: o * 2) and None),
    "forward hook on the activation": changed(lambda net: net[1].register_forward_hook(lambda m, i, o: o * 2) and None),
    "forward pre-hook": changed(lambda net: net[2].register_forward_pre_hook(lambda m, i: i[0] * 2) and None),
    "hook with keywords": changed(
        lambda net: net[0].register_forward_hook(lambda m, i, k, o: o * 2, with_kwargs=True) and None
    ),
    "backward hook": changed(lambda net: net[0].register_full_backward_hook(lambda m, i, o: None) and None),
    "backward pre-hook": changed(lambda net: net[0].register_full_backward_pre_hook(lambda m, o: None) and None),
    "hook that is always called": changed(
        lambda net: net[0].register_forward_hook(lambda m, i, o: o, always_call=True) and None
    ),
    "training dropout": changed(training),
    "batch norm": lambda: nn.Sequential(nn.Unflatten(-1, (1, 4)), nn.BatchNorm1d(4), nn.Flatten(0)).eval(),
    "layer norm of two dimensions": lambda: nn.Sequential(
        nn.Unflatten(-1, (2, 2)), nn.LayerNorm((2, 2)), nn.Flatten(-2)
    ),
    "recurrent layer": lambda: nn.Sequential(nn.Unflatten(-1, (1, 4)), nn.GRU(4, 4), First()),
    "softmax": lambda: nn.Softmax(-1),
    "prelu": lambda: nn.PReLU(),
    "hardtanh": lambda: nn.Hardtanh(),
    "hardswish": lambda: nn.Hardswish(),
    "subclass of Sequential with a forward": lambda: Reversed(nn.Linear(4, 4), nn.Tanh()),
    "module list": lambda: network("return self.layers[0](x)", imports=False),
    "double parameters in the middle": changed(lambda net: Casting(net)),
    "tensor subclass": set_weight(lambda w: nn.Parameter(w.as_subclass(Wrapped))),
    "parameter subclass": set_weight(lambda w: Half(w)),
    "subclass as an attribute": set_weight(lambda w: w.as_subclass(Wrapped)),
    "non-leaf parameter": set_weight(lambda w: w.clone().requires_grad_() * 1),
    "sparse parameter": set_weight(lambda w: nn.Parameter(w.to_sparse())),
    "compressed sparse parameter": set_weight(lambda w: nn.Parameter(w.to_sparse_csr())),
    "vmap": Ensemble,
    "to_module": Functional,
    "traced": lambda: torch.jit.trace(mlp(), torch.zeros(4)),
    "scripted": lambda: torch.jit.script(mlp()),
    "compiled": lambda: torch.compile(mlp(), backend="eager"),
    "compiled in place": changed(lambda net: net.compile(backend="eager")),
    "compiled inner module": changed(lambda net: net[0].compile(backend="eager")),
}  # fmt: skip


class First(nn.Module):
    """Takes the first part of a recurrent layer's results."""

    def forward(self, results: Any) -> Any:
        for one in results:
            return one.flatten()


class Reversed(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(list(self)):
            x = layer(x)
        return x


class Casting(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x.double()).float()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("case", REFUSED)
def test_modules_and_parameters_fall_back(case: str) -> None:
    torch.manual_seed(0)
    net = REFUSED[case]()
    setting = Setting(module(net), X, Y)
    mine = setting.play()[("y",)]
    assert not setting.is_native()
    assert all("torch (" in one and not one.endswith("()") for one in setting.said), setting.said
    with torch.no_grad():
        assert torch.equal(mine, torch.stack([net(row) for row in X[("x",)]]))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("case", REFUSED)
def test_the_native_backend_refuses_with_the_reason(case: str) -> None:
    with pytest.raises(UnsupportedError, match="policy_backend='native'.*torch \\("):
        Setting(module(REFUSED[case]()), X, Y, backend="native").play()


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.double(),
        lambda net: net.half(),
        lambda net: net.bfloat16(),
        lambda net: net.to("meta"),
        lambda net: setattr(net[0], "weight", nn.Parameter(noise(3, 8, 4), requires_grad=False)),
        lambda net: setattr(net[0], "weight", nn.Parameter(noise(8, 5))),
        lambda net: setattr(
            net[0], "weight", nn.Parameter(torch.ones(8, 4, dtype=torch.int8), requires_grad=False)
        ),
    ],
    ids=["float64", "half", "bfloat16", "meta", "extra dimension", "other shape", "integers"],
)
def test_parameters_that_torch_itself_refuses_raise_torchs_error(change: Any) -> None:
    net = mlp()
    change(net)
    with torch.no_grad(), pytest.raises(Exception) as theirs:
        net(X[("x",)][0])
        raise PolicyError("the result is on another device, or of another dtype")
    setting = Setting(module(net), X, Y)
    with pytest.raises((theirs.type, PolicyError)):
        setting.play()
    assert not setting.is_native()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_quantized_layers_fall_back() -> None:
    if torch.backends.quantized.engine in ("none", None):
        pytest.skip("no engine for quantized layers")
    net = torch.ao.quantization.quantize_dynamic(mlp().eval(), {nn.Linear})
    setting = Setting(module(net), {("x",): noise(2, 3, 4)}, Y, (2,))
    require_torch(setting)
    assert not setting.is_native()


@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8, torch.int64, torch.float16], ids=str)
def test_observations_of_another_dtype_fall_back(dtype: torch.dtype) -> None:
    net = loaded(
        "class Net(Network):\n    def forward(self, x):\n        return x * 2\n", False, Network=Network
    )["Net"]()
    x = (noise(3, 4).abs() * 9).to(dtype)
    setting = Setting(module(net), {("x",): x}, {("y",): Field(torch.Size([4]), dtype)})
    require_torch(setting)
    assert not setting.is_native() and "x" in setting.said[0]


@pytest.mark.parametrize("change", [lambda p: p.requires_grad_(False), lambda p: p.requires_grad_(True)])
def test_requires_grad_does_not_matter(change: Any) -> None:
    net = mlp()
    for one in net.parameters():
        change(one)
    assert played(net).is_native()


def test_weights_that_are_not_contiguous_equal_torch() -> None:
    net = mlp()
    net[0].weight = nn.Parameter(noise(4, 8).t())
    net[2].weight = nn.Parameter(
        noise(8, 16)[::2, ::2].contiguous()[:4].clone(memory_format=torch.contiguous_format)
    )
    net[2].bias = nn.Parameter(noise(1).expand(4))
    assert played(net).is_native()


@pytest.mark.parametrize("view", [torch._neg_view, lambda w: torch._neg_view(torch._neg_view(w))])
def test_lazily_negated_weights_equal_torch(view: Any) -> None:
    net = mlp()
    net[0].weight = nn.Parameter(view(net[0].weight.detach()))
    played(net)


def test_tied_weights_equal_torch() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    net.append(net[0])
    assert played(net).is_native()


# -------------------------------------------------------------------------------------------------------------- modes
class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def global_hook(register: Callable[..., Any], hook: Any) -> Any:
    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def default_device() -> Any:
    torch.set_default_device("cpu")
    try:
        yield
    finally:
        torch.set_default_device(None)


hooks = nn.modules.module
MODES: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "function mode": FunctionMode,
    "dispatch mode": DispatchMode,
    "default device": default_device,
    "deterministic": deterministic,
    "global forward hook": lambda: global_hook(hooks.register_module_forward_hook, lambda m, i, o: o),
    "global forward pre-hook": lambda: global_hook(hooks.register_module_forward_pre_hook, lambda m, i: i),
    "global backward hook": lambda: global_hook(
        hooks.register_module_full_backward_hook, lambda m, i, o: None
    ),
}


@pytest.mark.filterwarnings("ignore:For backward hooks to be called")
@pytest.mark.parametrize("mode", MODES)
def test_modes_fall_back_for_as_long_as_they_are_on(mode: str) -> None:
    setting = Setting(module(mlp()), X, Y)
    setting.play()
    assert setting.is_native(), setting.said
    with MODES[mode]():
        with torch.no_grad():
            assert reason_for_torch()
        require_torch(setting)
    assert not setting.is_native()
    require_torch(setting)
    assert setting.is_native(), setting.said


def test_enabled_gradients_fall_back() -> None:
    assert reason_for_torch()
    with torch.no_grad():
        assert reason_for_torch() is None
    with torch.inference_mode():
        assert reason_for_torch() is None


def test_a_transformation_of_functorch_falls_back() -> None:
    said = []

    def inside(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            said.append(reason_for_torch())
        return x

    torch.vmap(inside)(torch.zeros(2, 3))
    assert said[0]


# -------------------------------------------------------------------------------------------- changes between blocks
class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.scale, self.w = nn.Linear(4, 4), 2.0, nn.Parameter(noise(4))
        self.other = nn.Linear(4, 4)


OUTER = """
class Net(Network):
    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.bias = None
    def forward(self, x):
        y = F.linear(self.act(self.inner.fc(x)), self.w, self.inner.w_bias)
        return y * self.inner.scale * self.scale + self.mean
"""


def outer() -> Any:
    net = loaded(OUTER, False, Network=Network, Inner=Inner)["Net"]()
    net.inner.register_parameter("w_bias", None)
    return net


DEEP = {
    "call": "self.inner.fc(x)",
    "weight": "F.linear(x, self.inner.fc.weight, self.inner.fc.bias)",
    "parameter": "x * self.inner.w",
}


def deep(line: str) -> Callable[[], Any]:
    """Return a function that makes a network that reads only the parts of a part."""

    def make() -> Any:
        source = f"class Net(Network):\n    def forward(self, x):\n        return {DEEP[line]}\n"
        net = loaded(source, False, Network=Network)["Net"]()
        net.inner = Inner()
        return net

    return make


def other_inner() -> Inner:
    inner = Inner()
    inner.register_parameter("w_bias", None)
    return inner


BIASED = """
class Net(Network):
    def __init__(self):
        super().__init__()
        self.register_parameter("late", None)
    def forward(self, x):
        return F.linear(x, self.w, self.late)
"""


def with_ones(inner: Inner) -> Inner:
    nn.init.ones_(inner.w)
    return inner


def shifted(net: nn.Sequential) -> nn.Sequential:
    nn.init.normal_(net[1].bias)
    return net


class Tripled(nn.Tanh):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 3 * torch.tanh(input)


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "weight in place": (mlp, lambda net: net[0].weight.data.mul_(2)),
    "weight's data": (mlp, lambda net: setattr(net[0].weight, "data", noise(8, 4))),
    "loaded state": (mlp, lambda net: net.load_state_dict({k: v * 2 for k, v in net.state_dict().items()})),
    "assigned state": (
        mlp,
        lambda net: net.load_state_dict({k: v * 2 for k, v in net.state_dict().items()}, assign=True),
    ),
    "lazily negated weight": (
        mlp,
        lambda net: setattr(net[0], "weight", nn.Parameter(torch._neg_view(net[0].weight.detach()))),
    ),
    "parameter": (mlp, lambda net: setattr(net[0], "weight", nn.Parameter(noise(8, 4)))),
    "frozen parameter": (mlp, lambda net: net.requires_grad_(False)),
    "bias to None": (mlp, lambda net: setattr(net[0], "bias", None)),
    "bias from None": (
        lambda: nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh()),
        lambda net: setattr(net[0], "bias", nn.Parameter(noise(4))),
    ),
    "norm's bias to None": (
        lambda: shifted(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))),
        lambda net: setattr(net[1], "bias", None),
    ),
    "norm's weight from None": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, elementwise_affine=False)),
        lambda net: setattr(net[1], "weight", nn.Parameter(noise(4))),
    ),
    "eps of a norm": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)),
        lambda net: setattr(net[1], "eps", 1.0),
    ),
    "hidden width": (
        mlp,
        lambda net: (setattr(net[0], "weight", nn.Parameter(noise(6, 4))), setattr(net[0], "bias", None),
                     setattr(net[2], "weight", nn.Parameter(noise(4, 6)))),
    ),
    "layer": (mlp, lambda net: net.__setitem__(0, nn.Linear(4, 8))),
    "activation": (mlp, lambda net: net.__setitem__(1, nn.ReLU())),
    "another class of activation": (mlp, lambda net: net.__setitem__(1, Tripled())),
    "class of an activation": (mlp, lambda net: setattr(net[1], "__class__", nn.Sigmoid)),
    "removed layer": (lambda: mlp().append(nn.Tanh()), lambda net: net.__delitem__(3)),
    "appended layer": (mlp, lambda net: net.append(nn.Tanh())),
    "inserted layer": (mlp, lambda net: net.insert(1, nn.ReLU())),
    "nested layer": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh())),
        lambda net: net[1].append(nn.ReLU()),
    ),
    "slope": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU()),
        lambda net: setattr(net[1], "negative_slope", 0.5),
    ),
    "alpha": (lambda: nn.ELU(), lambda net: setattr(net, "alpha", 0.5)),
    "beta": (lambda: nn.Softplus(), lambda net: setattr(net, "beta", 3)),
    "approximation": (lambda: nn.GELU("tanh"), lambda net: setattr(net, "approximate", "none")),
    "forward hook": (mlp, lambda net: net[1].register_forward_hook(lambda m, i, o: o * 2)),
    "forward pre-hook": (mlp, lambda net: net[0].register_forward_pre_hook(lambda m, i: i[0] * 2)),
    "hook on the sequence": (mlp, lambda net: net.register_forward_hook(lambda m, i, o: o * 2)),
    "replaced forward": (mlp, lambda net: setattr(net[1], "forward", torch.relu)),
    "compiled": (mlp, lambda net: net.compile(backend="eager")),
    "parametrization": (mlp, lambda net: parametrize.register_parametrization(net[0], "weight", Doubled())),
    "double": (mlp, lambda net: net.__setitem__(0, Casting(nn.Linear(4, 8)))),
    "numeric attribute": (outer, lambda net: setattr(net, "scale", 0.5)),
    "numeric attribute of a part": (outer, lambda net: setattr(net.inner, "scale", 0.5)),
    "attribute that becomes a parameter": (
        outer,
        lambda net: (delattr(net, "scale"), net.register_parameter("scale", nn.Parameter(noise(1)))),
    ),
    "attribute that becomes a tensor": (outer, lambda net: setattr(net.inner, "scale", noise(4))),
    "buffer": (outer, lambda net: setattr(net, "mean", noise(4, seed=9))),
    "buffer in place": (outer, lambda net: net.mean.add_(1)),
    "submodule": (outer, lambda net: setattr(net, "act", nn.ReLU())),
    "layer of a part": (outer, lambda net: setattr(net.inner, "fc", nn.Linear(4, 4))),
    "layers of a part swapped": (
        outer,
        lambda net: (setattr(net, "kept", net.inner.fc), setattr(net.inner, "fc", net.inner.other)),
    ),
    "part": (outer, lambda net: setattr(net, "inner", other_inner())),
    "hook on a part's layer": (outer, lambda net: net.inner.fc.register_forward_hook(lambda m, i, o: o * 2)),
    "missing bias of a part": (outer, lambda net: setattr(net.inner, "w_bias", nn.Parameter(noise(4)))),
    "forward of the network": (outer, lambda net: setattr(net, "forward", lambda x: x * 3)),
    "call of the network's class": (outer, lambda net: setattr(type(net), "__call__", lambda self, x: x * 3)),
    "bias of the network from None": (
        lambda: loaded(BIASED, False, Network=Network)["Net"](),
        lambda net: setattr(net, "late", nn.Parameter(noise(4))),
    ),
    "only layer of a part": (deep("call"), lambda net: setattr(net.inner, "fc", nn.Linear(4, 4))),
    "only layer of a part, read as weights": (deep("weight"), lambda net: setattr(net.inner, "fc", nn.Linear(4, 4))),
    "part whose parameter is read": (deep("parameter"), lambda net: setattr(net, "inner", with_ones(Inner()))),
    "parameter of a part": (deep("parameter"), lambda net: setattr(net.inner, "w", nn.Parameter(noise(4, seed=3)))),
    "bias of a part's layer to None": (deep("weight"), lambda net: setattr(net.inner.fc, "bias", None)),
    "hook of a part's layer": (deep("call"), lambda net: net.inner.fc.register_forward_hook(lambda m, i, o: o * 2)),
    "forward of a part's layer": (deep("call"), lambda net: setattr(net.inner.fc, "forward", lambda x: x * 3)),
    "class": (outer, lambda net: setattr(net, "__class__", type(network("return x * 3", imports=False)))),
    "wrapper": (lambda: nn.Sequential(mlp()), lambda net: net.__setitem__(0, nn.Sequential(net[0], nn.Tanh()))),
}  # fmt: skip


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.mark.parametrize("case", CHANGES)
def test_changes_between_two_blocks_take_effect(case: str) -> None:
    make, change = CHANGES[case]
    torch.manual_seed(3)
    net = make()
    setting = Setting(module(net), X, Y)
    require_torch(setting)
    assert setting.is_native(), setting.said
    before = setting.play()[("y",)]
    require_torch(setting)
    with torch.no_grad():
        change(net)
    require_torch(setting)
    changes_values = case not in ("frozen parameter", "compiled")
    assert torch.allclose(before, setting.play()[("y",)], atol=1e-5) is not changes_values


@pytest.mark.parametrize("trained", [nn.Dropout(0.5), nn.Dropout(1.0)])
def test_a_module_moved_to_train_falls_back(trained: nn.Module) -> None:
    net = nn.Sequential(nn.Linear(4, 4), trained).eval()
    setting = played(net)
    assert setting.is_native(), setting.said
    net.train()
    zeros = (setting.play()[("y",)] == 0).any()
    assert not setting.is_native() and zeros
    net.eval()
    require_torch(setting)
    assert setting.is_native(), setting.said


def test_a_forward_of_a_layer_class_that_was_replaced_takes_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = played(mlp())
    monkeypatch.setattr(nn.Tanh, "forward", lambda self, x: torch.relu(x))
    require_torch(setting)


def test_a_forward_of_a_layer_class_that_was_replaced_before_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    original = nn.Tanh.forward
    monkeypatch.setattr(nn.Tanh, "forward", lambda self, x: (calls.append(1), original(self, x))[1])
    setting = Setting(module(mlp()), X, Y)
    setting.play()
    calls.clear()
    setting.play()
    assert len(calls) == 3, setting.said


def test_a_call_of_a_layer_class_that_was_replaced_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = played(mlp())
    original = nn.Module.__call__
    monkeypatch.setattr(nn.Tanh, "__call__", lambda self, *x: 2 * original(self, *x), raising=False)
    require_torch(setting)


def test_a_patched_function_of_torch_takes_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    net = network("return F.relu(x)", imports=False)
    setting = played(net)
    monkeypatch.setattr(nn.functional, "relu", torch.tanh)
    require_torch(setting)
