"""What a run needs before it is started: memory, time and layout, from a step of the real code."""

from lamina.models.plan.constants import machine
from lamina.models.plan.fsdp2 import fsdp2
from lamina.models.plan.job import Job
from lamina.models.plan.job_plan import Plan, plan
from lamina.models.plan.preflight import Call, standstill
from lamina.models.plan.record.compiled import compiled
from lamina.models.plan.record.recorder import StepRecorder
from lamina.models.plan.search import search

__all__ = [
    "Call",
    "Job",
    "Plan",
    "StepRecorder",
    "compiled",
    "fsdp2",
    "machine",
    "plan",
    "search",
    "standstill",
]
