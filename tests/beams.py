"""The oracle of beam search: its definition, over all continuations of all beams."""


def exhaustive(logprobs, params, stops):
    """Returns the (tokens, log-probability) found, the best first.

    Args:
        logprobs: of every next token, given the tokens so far.
        params: `BeamSearchParams`.
        stops: tokens that end a continuation.
    """
    W, penalty = params.beam_width, params.length_penalty
    running, finished = [([], 0.0)], []
    for length in range(1, params.max_tokens + 1):
        every = [
            (total + float(logprob), [*tokens, token])
            for tokens, total in running
            for token, logprob in enumerate(logprobs(tokens))
        ]
        every.sort(key=lambda one: -one[0])
        ends = [length == params.max_tokens or tokens[-1] in stops for _, tokens in every]
        finished += [(total / length**penalty, total, tokens) for (total, tokens), end in zip(every[:W], ends) if end]
        finished = sorted(finished, key=lambda one: -one[0])[:W]
        running = [(tokens, total) for (total, tokens), end in zip(every, ends) if not end][:W]
        if not running or (len(finished) == W and params.early_stopping is True):
            break
        far = params.max_tokens if params.early_stopping == "never" and penalty > 0 else length
        if len(finished) == W and running[0][1] / far**penalty <= finished[-1][0]:
            break
    return [(tokens, total) for _, total, tokens in finished]
