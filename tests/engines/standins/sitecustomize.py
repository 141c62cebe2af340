"""Makes a CUDA build of torchvision importable beside a CPU build of torch: Python runs this at its start.

torchvision registers shapes for operators that its library, which is not loaded here, would have defined.
"""

import importlib.abc
import sys

import quick  # noqa: F401  its own hook is hidden by this one


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None:  # else torchvision loads its library
                global _library
                _library = torch.library.Library("torchvision", "DEF")
                for operator in ("nms", "qnms"):
                    _library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_library = None
sys.meta_path.insert(0, _BeforeTorchvision())
