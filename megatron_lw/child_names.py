"""Names of the children: what settings, overrides, routing and plan call them."""

from __future__ import annotations

ELEMENTWISE_CHILDREN = ("adam", "lion", "sgd")
"""Children that see flat slices of rows."""
MUON_CHILDREN = ("muon", "normuon", "adamuon", "adaptive_muon")
"""Children that orthogonalise whole matrices."""
WHOLE_CHILDREN = ("whole", "soap")
"""Children that hand whole parameters to an optimizer of torch's kind."""
MATRIX_CHILDREN = frozenset({*MUON_CHILDREN, *WHOLE_CHILDREN})
"""Children that step whole matrices; the others step element by element."""
CHILDREN = (*ELEMENTWISE_CHILDREN, *MUON_CHILDREN, *WHOLE_CHILDREN)
