"""A peer whose digits task freezes layers, for tests: ``python freezing.py ARGUMENTS OF THE PROGRAM``.

FROZEN names the layers by their numbers, with commas; RANDOM=1 leaves them the values that they were drawn with.
"""

from __future__ import annotations

import os

import torch
from torch import nn

from p2p_trainer.tasks.digits import DigitsTask

if __name__ == "__main__":
    build = DigitsTask.build_model

    def frozen(self: DigitsTask) -> nn.Module:
        model = build(self)
        for index, (name, parameter) in enumerate(model.named_parameters()):
            if name.split(".")[0] in os.environ["FROZEN"].split(","):
                parameter.requires_grad_(False)
                if "RANDOM" not in os.environ and not parameter.is_meta:
                    generator = torch.Generator().manual_seed(index)
                    parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        return model

    DigitsTask.build_model = frozen  # type: ignore[method-assign]
    from p2p_trainer.cli import main

    main()
