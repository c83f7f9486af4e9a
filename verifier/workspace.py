"""What a pass takes of a GPU's memory besides weights and KV: counted from the shapes of its tensors, not measured.

Tensors of several layers do not live at the same time, so the largest of each kind is counted once. The kernels say
themselves how they cut their work; this module is for machines that have them.

Legend: H hidden width, Q query heads, G kv heads, D head dim, I inner width, V vocabulary.
"""

from __future__ import annotations

from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.sizes import GATE_UP, QKV, products
from foresay.verifier.ops.kernels.blocked import LEAST_BLOCK, segments_of
from foresay.verifier.ops.kernels.tree_attention import most_parts


def workspace_bytes(model: ModelConfig, item: int, positions: int, rows: int, tree_rows: int) -> int:
    """The tensors of the largest pass, in bytes.

    item: bytes of a weight. positions: slots of the longest page table. rows: most rows of a pass, any of which may
    want logits. tree_rows: those of them that are in trees, whose attention is split.
    """
    return (
        rows * _row_numbers(model) * item
        + 4 * rows * model.vocab_size  # logits
        + 4 * rows * _linear_partials(model)
        + 4 * tree_rows * model.num_heads * (model.head_dim + 2) * most_parts(positions)
    )


def rope_bytes(model: ModelConfig, item: int, positions: int) -> int:
    """The cosines and sines of so many positions, in the model's dtype."""
    return 2 * item * positions * model.head_dim


def _row_numbers(model: ModelConfig) -> int:
    """Activations of one row: stream, its sum and norm; qkv, turned queries, attended; gate, up and their product."""
    widths = {product.name: product.outer for product in products(model)}
    queries = model.num_heads * model.head_dim
    return 3 * model.hidden_size + widths[QKV] + 2 * queries + widths[GATE_UP] + model.intermediate_size


def _linear_partials(model: ModelConfig) -> int:
    """fp32 sums of one row in the widest product that is cut into segments; 0 if none is. Counted in the
    smallest blocks, of which segments are the most.
    """
    shapes = [(product.outer, product.inner) for product in products(model)] + [(model.vocab_size, model.hidden_size)]
    cut = [(segments_of(outer, -(-inner // LEAST_BLOCK), LEAST_BLOCK)[0], outer) for outer, inner in shapes]
    return max(segments * outer if segments > 1 else 0 for segments, outer in cut)
