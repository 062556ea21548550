"""A SentencePiece BPE vocabulary (pieces with scores, no merges) as a `tokenizers` BPE model."""

from collections.abc import Sequence

from tokenizers import decoders, models, normalizers

SPACE = "\u2581"


def build_model(pieces: Sequence[str], scores: Sequence[float], mergeable: Sequence[bool], unk: str | None):
    """Returns the BPE model that picks the same pieces as SentencePiece.

    Args:
        pieces: Every token, by id.
        scores: Score of each piece; SentencePiece always makes the adjacent pair with the highest one.
        mergeable: Whether a pair may become this piece (false for control, byte and unused pieces).
        unk: The piece for characters that neither the vocabulary nor the byte pieces can write.
    """
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    return models.BPE(
        vocab=vocab,
        merges=_merges(pieces, scores, mergeable),
        unk_token=unk,
        fuse_unk=True,
        byte_fallback=all(f"<0x{byte:02X}>" in vocab for byte in range(256)),
    )


def build_normalizer(add_space_prefix: bool) -> normalizers.Normalizer:
    """Returns the normalizer that writes spaces as U+2581, one more in front of every plain text."""
    spaces = normalizers.Replace(" ", SPACE)
    return normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if add_space_prefix else spaces


def build_decoder(add_space_prefix: bool) -> decoders.Decoder:
    """Returns the decoder that undoes `build_normalizer` and turns byte pieces into text."""
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if add_space_prefix else steps)


def _merges(pieces: Sequence[str], scores: Sequence[float], mergeable: Sequence[bool]) -> list[tuple[str, str]]:
    """Returns every pair of pieces that makes a piece, best score first.

    SentencePiece takes the leftmost of equally good pairs, which a merge list cannot say. It matters only
    where two pieces with the same score overlap, and trained models give every piece a score of its own.
    """
    usable = {piece for piece, can_merge in zip(pieces, mergeable) if can_merge}
    ranked = sorted(
        (token_id for token_id, can_merge in enumerate(mergeable) if can_merge and len(pieces[token_id]) > 1),
        key=lambda token_id: (-scores[token_id], token_id),
    )
    merges = []
    for token_id in ranked:
        piece = pieces[token_id]
        for cut in range(1, len(piece)):
            left = piece[:cut]
            if left in usable and (right := piece[cut:]) in usable:
                merges.append((left, right))
    return merges
