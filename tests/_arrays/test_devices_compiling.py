"""Compiled programs break their graph at calls that the compiler must not trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._C._dynamo import eval_frame

from gleanrl._arrays.devices import outside_graphs


@pytest.mark.parametrize("torch_knows", [True, False])
def test_compiled_programs_break_their_graph_at_the_call(monkeypatch, torch_knows):
    if not torch_knows:  # torch before 2.7 has no such function
        monkeypatch.delattr(eval_frame, "set_code_exec_strategy", raising=False)
    addresses, compiled = [], []

    def below(tensor: torch.Tensor) -> torch.Tensor:
        addresses.append(tensor.data_ptr())
        return tensor + 1

    class Notes:
        @outside_graphs
        def note(self, tensor: torch.Tensor) -> torch.Tensor:
            assert not torch.compiler.is_compiling()
            return below(tensor)

    class More(Notes):
        def note(self, tensor: torch.Tensor) -> torch.Tensor:
            return super().note(tensor) + 1

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append([node.name for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    @torch.compile(backend=backend)
    def program(notes: Notes, tensor: torch.Tensor) -> torch.Tensor:
        return notes.note(tensor) * 2

    tensor = torch.arange(3)
    assert program(Notes(), tensor).tolist() == program(Notes(), tensor).tolist() == [2, 4, 6]
    assert addresses == [tensor.data_ptr()] * 2 and compiled == [["mul"]]
    assert program(More(), tensor).tolist() == [4, 6, 8] and addresses[2:] == [tensor.data_ptr()]


def test_without_compiling_the_method_is_unchanged():
    def method(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    assert outside_graphs(method) is method or not hasattr(eval_frame, "set_code_exec_strategy")
