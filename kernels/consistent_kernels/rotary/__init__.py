"""Rotary position embedding with fp32 tables inside the op."""

from consistent_kernels.rotary.api import norm_rotary, rotary, rotary_bwd
from consistent_kernels.rotary.parameters import RopeParameters
from consistent_kernels.rotary.tables import rope_tables

__all__ = ["RopeParameters", "norm_rotary", "rope_tables", "rotary", "rotary_bwd"]
