"""Mixture of experts: routers, dispatch, grouped experts, losses."""

from lamina.models.base.configs.moe import MoEConfig
from lamina.models.moe.dispatcher import Dispatch, ExpertRows, TokenDispatcher
from lamina.models.moe.expert_axes import ExpertAxes
from lamina.models.moe.experts import GroupedExperts
from lamina.models.moe.layer import MoELayer
from lamina.models.moe.losses import AuxiliaryScale, RoutingContext
from lamina.models.moe.router import LayerRouting, TopKRouter, routing_statistics
from lamina.models.moe.routing import Routing

__all__ = [
    "AuxiliaryScale",
    "Dispatch",
    "ExpertAxes",
    "ExpertRows",
    "GroupedExperts",
    "LayerRouting",
    "MoEConfig",
    "MoELayer",
    "Routing",
    "RoutingContext",
    "TokenDispatcher",
    "TopKRouter",
    "routing_statistics",
]
