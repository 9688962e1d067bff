"""Data parallelism for PyTorch: bucketed DDP, sharded optimizer, `finalize_grads`, true norms."""

from lamina.ddp.backward.agreement import LargeGradientError, NonFiniteGradientError
from lamina.ddp.finalize.finalize import FinalizesStep, finalize_grads
from lamina.ddp.inspect.inspection import full_gradients, full_parameters
from lamina.ddp.inspect.memory import MemoryPlan, memory_plan
from lamina.ddp.inspect.wire import wire_plan
from lamina.ddp.monitor.health import Decision, HealthMonitor, Judgement
from lamina.ddp.monitor.pace import Straggler
from lamina.ddp.monitor.replicas import ReplicaError, ReplicaMonitor
from lamina.ddp.norm.clip import clip_grad_norm
from lamina.ddp.optimizer.grad_scaler import ShardedGradScaler
from lamina.ddp.optimizer.muon import Muon
from lamina.ddp.optimizer.sharded_optimizer import ShardedOptimizer
from lamina.ddp.parameters.strategy import Cadence, Strategy
from lamina.ddp.wrapper.config import DistributedDataParallelConfig
from lamina.ddp.wrapper.wrapper import DataParallel, DistributedDataParallel

__all__ = [
    "Cadence",
    "DataParallel",
    "Decision",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "FinalizesStep",
    "HealthMonitor",
    "Judgement",
    "LargeGradientError",
    "MemoryPlan",
    "Muon",
    "NonFiniteGradientError",
    "ReplicaError",
    "ReplicaMonitor",
    "ShardedGradScaler",
    "ShardedOptimizer",
    "Straggler",
    "Strategy",
    "clip_grad_norm",
    "finalize_grads",
    "full_gradients",
    "full_parameters",
    "memory_plan",
    "wire_plan",
]
