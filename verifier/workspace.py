"""What a pass takes of a GPU's memory besides weights and KV: counted from the shapes of its tensors, not measured.

Tensors of several layers do not live at the same time, so the largest of each kind is counted once. The kernels say
themselves how they cut their work; this module is for machines that have them.

Legend: H hidden width, Q query heads, G kv heads, D head dim, I inner width, V vocabulary.
"""

from __future__ import annotations

from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.nodes import GATE_UP, QKV, Layer
from foresay.verifier.model.sizes import products
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
        + 4 * tree_rows * max(map(_attended, model.stack.layers)) * most_parts(positions)
    )


def _attended(layer: Layer) -> int:
    """fp32 numbers of a part of a row's attention: sums by head, and the largest score and the weights' sum."""
    return layer.attention.heads * (layer.attention.head_dim + 2)


def rope_bytes(model: ModelConfig, item: int, positions: int) -> int:
    """The cosines and sines of so many positions, in the model's dtype."""
    return 2 * item * positions * model.head_dim * sum(rope is not None for rope in model.ropes)


def _row_numbers(model: ModelConfig) -> int:
    """Activations of one row: stream, its sum and norm; qkv, turned queries, attended; gate, up and their product."""
    widths = [product.outer for _, product in products(model) if product.name in (QKV, GATE_UP)]
    inside = max(map(sum, zip(widths[::2], widths[1::2], strict=True)))
    attention = [layer.attention for layer in model.stack.layers]
    queries = max(each.heads * each.head_dim for each in attention)
    return 3 * model.hidden_size + inside + 2 * queries + max(layer.mlp.inner for layer in model.stack.layers)


def _linear_partials(model: ModelConfig) -> int:
    """fp32 sums of one row in the widest product that is cut into segments; 0 if none is. Counted in the
    smallest blocks, of which segments are the most.
    """
    shapes = {(product.outer, product.inner) for _, product in products(model)} | {
        (model.vocab_size, model.hidden_size)
    }
    cut = [(segments_of(outer, -(-inner // LEAST_BLOCK), LEAST_BLOCK)[0], outer) for outer, inner in shapes]
    return max(segments * outer if segments > 1 else 0 for segments, outer in cut)
