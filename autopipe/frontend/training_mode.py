"""Put a user's model into training or evaluation, as the loop of a training does.

net.backbone.eval()                          in model(): that part stays in evaluation
def train(self, mode=True): ...              of a class: a loop calls it, and it may leave parts
                                             in evaluation, as the norms of a frozen backbone
"""

from __future__ import annotations

from torch import nn


def put_into(model: nn.Module, training: bool) -> nn.Module:
    """Put a model into training or evaluation; returns the model.

    A model that is in training already keeps the parts that it has put into evaluation, and its own
    `train` methods are called all the same.
    """
    if model.training != training:
        model.train(training)
    elif training and _has_its_own(model):
        still = [module for module in model.modules() if not module.training]
        model.train()
        for module in still:
            module.training = False
    return model


def _has_its_own(model: nn.Module) -> bool:
    """Whether one of its modules has a `train` method of its own."""
    own = (getattr(module.train, "__func__", None) for module in model.modules())
    return any(method is not nn.Module.train for method in own)
