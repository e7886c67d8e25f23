"""Models as files for other runtimes: ONNX, torch.export, AOTInductor and ExecuTorch, each checked where it runs."""

from compressm.errors import ExportError
from compressm.exporting.formats import ONNX, AOTInductor, ExecuTorch, Format, Loaded, TorchExport
from compressm.exporting.writing import Exported, export, flat

__all__ = [
    "ONNX",
    "AOTInductor",
    "ExecuTorch",
    "ExportError",
    "Exported",
    "Format",
    "Loaded",
    "TorchExport",
    "export",
    "flat",
]
