"""Rotary position embedding with fp32 tables inside the op."""

from consistent_kernels.rotary.api import rotary, rotary_bwd
from consistent_kernels.rotary.parameters import RopeParameters
from consistent_kernels.rotary.tables import rope_tables

__all__ = ["RopeParameters", "rope_tables", "rotary", "rotary_bwd"]
