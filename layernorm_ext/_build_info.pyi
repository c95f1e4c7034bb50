# build_support/extension.py writes _build_info.py.
version: str
torch_version: str
torch_cuda_version: str | None
with_cuda: bool
cuda_reason: str
cuda_architectures: str | None
cpu_capabilities: tuple[str, ...]
debug: bool
