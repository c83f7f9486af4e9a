"""A DFlash or DSpark head's tensors, read from the layouts it is published in and fused for the products.

The embedding and the output matrix are the target's unless the file has its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from foresay.verifier.heads.dflash_config import DFlashConfig
from foresay.verifier.heads.files import HeadTensors
from foresay.verifier.heads.layer import HeadLayer
from foresay.verifier.heads.markov import MarkovHead
from foresay.verifier.heads.reader import HeadReader
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.linear import Linear, Matrix
from foresay.verifier.ops.records import Norm

_IGNORED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|verifier_\w+\.weight)$")
#: transformers' names of what the authors call otherwise.
_RENAMED = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}


@dataclass(slots=True)
class DFlashWeights:
    """All weights of a head, in the target's dtype.

    embed: [V, H]. fc: [H, F]. head: H to V'. norms: those outside the layers, by name. token_ids: int64[V'], the
    target's id of each draft id; None where they are the same. markov: DSpark's, None of DFlash.
    """

    embed: Tensor
    fc: Matrix
    layers: tuple[HeadLayer, ...]
    head: Linear
    norms: dict[str, Norm]
    token_ids: Tensor | None
    markov: MarkovHead | None

    @classmethod
    def read(cls, directory: Path, config: DFlashConfig, target: Decoder) -> DFlashWeights:
        """The weights in ``directory``; raises WeightsError naming the file and the tensor."""
        read = HeadTensors.read(directory)
        named = {_short(name): tensor for name, tensor in read.tensors.items() if not _IGNORED.search(name)}
        reader = HeadReader(HeadTensors(named, read.where), config.layer, config.draft_vocab, target)
        # What estimates acceptance is known and not asked: chances are calibrated by what comes
        # (foresay.drafters.calibration).
        reader.known |= {"confidence_head.proj.weight", "confidence_head.proj.bias"}
        hidden, layers = config.layer.hidden_size, range(config.layer.num_layers)
        made = cls(
            embed=reader.embed(),
            fc=reader.mixer(len(config.names)),
            layers=tuple(reader.head_layer(number, hidden, normed=True, first=0) for number in layers),
            head=reader.head(),
            norms={name: reader.norm(name, hidden) for name in ("hidden_norm", "norm")},
            token_ids=reader.token_ids(),
            markov=None if config.markov is None else MarkovHead.read(config.markov, reader),
        )
        reader.files.check_known(reader.known)
        return made


def _short(name: str) -> str:
    name = name.removeprefix("model.")
    return _RENAMED.get(name, name)
