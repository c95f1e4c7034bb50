"""Makes torch.jit.script compile a public function as a call of the operator of the same name.

TorchScript supports neither keyword-only arguments with defaults nor ``__torch_function__``. It takes all arguments by
position.
"""

import linecache
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Optional

import torch


def compile_as_operators(*functions: Callable[..., Any]) -> None:
    """Have torch.jit.script compile the operators in place of these functions."""
    for function in functions:
        vars(function)["__prepare_scriptable__"] = partial(_call_of_operator, function.__name__)


@cache
def _call_of_operator(name: str) -> Callable[..., Any]:
    """Return a function with the operator's arguments; torch.jit.script reads its source from the line cache."""
    arguments = getattr(torch.ops.layernorm, name).default._schema.arguments
    parameters = [
        f"{argument.name}: {argument.type}" + (f" = {argument.default_value!r}" if argument.has_default_value() else "")
        for argument in arguments
    ]
    values = [f"{argument.name}={argument.name}" for argument in arguments]
    source = f"def {name}({', '.join(parameters)}):\n    return torch.ops.layernorm.{name}({', '.join(values)})\n"
    file = f"<layernorm_ext.{name}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    namespace: dict[str, Any] = {
        "__name__": __name__,
        "torch": torch,
        "Tensor": torch.Tensor,
        "List": list,
        "Optional": Optional,
    }
    exec(compile(source, file, "exec"), namespace)
    return namespace[name]
