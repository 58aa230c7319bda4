"""Speculation: what drafting does, what it gains over plain decoding, and which drafter does how much of it."""

from __future__ import annotations

from panels import Dashboard, Panel, Row, stat
from queries import GAIN, VARIABLES, chosen, increase, mean, model_rate, of_model, per_drafter, quantiles, rate, total

_POOL = "~$pool"
_ROUNDS = model_rate("moot_rounds_total")
_ACCEPTED = model_rate("moot_accepted_tokens_total")
_DRAFTED = model_rate("moot_draft_tokens_total")
_K = "moot_speculation_length"
_AT_ZERO = f"{model_rate(f'{_K}_bucket', le='0.0')} / {model_rate(f'{_K}_count')}"


def _drafter_rate(metric: str) -> str:
    return model_rate(metric, drafter=_POOL, by="drafter")


_DROPPED = total(of_model(rate("moot_proposals_dropped_total", drafter=_POOL)), by="drafter, reason")
_LEFT_OUT = f"max by (drafter, reason) ({of_model(chosen('moot_drafters_left_out', drafter=_POOL))})"
_AHEAD_USED = total(per_drafter(rate("moot_draft_ahead_used_tokens_total")), by="drafter")
_AHEAD_DROPPED = total(per_drafter(rate("moot_draft_ahead_dropped_tokens_total")), by="drafter")

_NOW = Row(
    "Now",
    [
        stat(
            "Gain over plain decoding",
            GAIN,
            "Estimated seconds of plain decoding for the same tokens, over the seconds of the rounds. 1: no gain.",
        ),
        stat(
            "Mean acceptance length",
            f"1 + {_ACCEPTED} / {_ROUNDS}",
            "Tokens that a round brings, the target's own included.",
        ),
        stat("Acceptance rate", f"{_ACCEPTED} / {_DRAFTED}", "Of verified draft tokens.", "percentunit"),
        stat("Agreement", mean("moot_vote_agreement_ratio"), "Mean, first token.", "percentunit"),
        stat("K", mean(_K), "Tokens asked of the drafters, mean over rounds."),
        stat("Rounds that do not draft", _AT_ZERO, "K = 0: plain decoding.", "percentunit"),
    ],
    height=4,
)
_GAINS = Row(
    "What it gains",
    [
        Panel(
            "Gain over plain decoding",
            {GAIN: "gain"},
            "Below the line drafting costs more than it brings. Plain steps are measured when they occur; where none "
            "was seen a step is taken to need as long without drafts, so that a loss shown here is one.",
            threshold=1,
        ),
        Panel(
            "Seconds of a round",
            {mean("moot_round_duration_seconds", by="stage"): "{{stage}}"},
            "draft: until the vote. verify: from there to the committed answer.",
            "s",
            stacked=True,
        ),
        Panel(
            "Draft tokens",
            {_DRAFTED: "verified", _ACCEPTED: "accepted", _ROUNDS: "rounds"},
            "Per second.",
        ),
    ],
)
_ACCEPTANCE = Row(
    "Acceptance and K",
    [
        Panel(
            "Rounds that accept position",
            {
                f"{model_rate('moot_accepted_tokens_per_position_total', by='position')} "
                f"/ ignoring (position) group_left () {_ROUNDS}": "{{position}}"
            },
            "Share of all rounds in which the draft's token at this depth was accepted; 0 is the first.",
            "percentunit",
            maximum=1,
        ),
        Panel(
            "K of the rounds",
            {total(of_model(increase(f"{_K}_bucket")), by="le"): "{{le}}"},
            "How often each length was asked for.",
            kind="heatmap",
        ),
        Panel(
            "Changes of K",
            {f"{model_rate('moot_speculation_length_changes_total')} / {_ROUNDS}": "of the rounds"},
            "Rounds that asked for another K than the round before.",
            "percentunit",
        ),
        Panel(
            "Agreement of the vote",
            quantiles("moot_vote_agreement_ratio", 0.1, 0.5, 0.9),
            "Share of the vote's weight behind the draft's first token.",
            "percentunit",
            maximum=1,
        ),
        Panel(
            "The router's own part",
            {mean("moot_round_turn_seconds", by="stage"): "{{stage}}"},
            "From reading the message that a round went on from until its command is written.",
            "s",
        ),
        Panel(
            "Drafter calls skipped",
            {model_rate("moot_drafter_calls_skipped_total"): "skipped"},
            "Dear drafters that were not asked since cheap ones were sure (--cascade), per second.",
        ),
    ],
)
_DRAFTERS = Row(
    "Drafters",
    [
        Panel("Tokens proposed", {_drafter_rate("moot_proposal_tokens_total"): "{{drafter}}"}, "Per second."),
        Panel(
            "Acceptance",
            {
                f"{_drafter_rate('moot_proposals_accepted_tokens_total')} "
                f"/ {_drafter_rate('moot_proposal_tokens_total')}": "{{drafter}}"
            },
            "Leading tokens that the target emitted, of all that the drafter proposed: won or not.",
            "percentunit",
            maximum=1,
        ),
        Panel(
            "Weight",
            {f"avg by (drafter) ({of_model(chosen('moot_drafter_weight', drafter=_POOL))})": "{{drafter}}"},
            "That the next request's vote starts from.",
            "percentunit",
            maximum=1,
        ),
        Panel(
            "Votes won",
            {f"{_drafter_rate('moot_votes_won_total')} / on () group_left () {_ROUNDS}": "{{drafter}}"},
            "Share of the rounds whose draft followed this drafter; several may propose the same.",
            "percentunit",
        ),
        Panel(
            "Proposals dropped, and why",
            {
                total(
                    of_model(rate("moot_proposals_dropped_total", drafter=_POOL)), by="drafter, reason"
                ): "{{drafter}} {{reason}}"
            },
            "late: after the vote. stale: its question is over. lost, ejected: with its replica. empty: it abstained.",
        ),
        Panel(
            "Not asked, and why",
            {_LEFT_OUT: "{{drafter}} {{reason}}"},
            "1 while rounds ask the drafter only to try it: it brings less than waiting for it costs.",
            maximum=1,
        ),
        Panel(
            "Ejections",
            {total(of_model(increase("moot_drafter_ejections_total", drafter=_POOL)), by="drafter"): "{{drafter}}"},
            "Replicas that were not asked for a while, after three failures.",
        ),
        Panel(
            "Seconds to draft, p95",
            {
                "histogram_quantile(0.95, "
                f"{total(per_drafter(rate('moot_draft_seconds_bucket')), by='drafter, le')})": "{{drafter}}"
            },
            "In the drafter's process, from the first step to the answer.",
            "s",
        ),
        Panel(
            "Drafted ahead",
            {_AHEAD_USED: "{{drafter}} used", _AHEAD_DROPPED: "{{drafter}} dropped"},
            "Tokens drafted while the verifier worked, per second. 0 where drafting ahead is off.",
        ),
    ],
)

DASHBOARD = Dashboard(
    uid="moot-speculation",
    title="Moot / Speculation",
    text="What drafting does, what it gains over plain decoding, and which drafter does how much of it.",
    rows=[_NOW, _GAINS, _ACCEPTANCE, _DRAFTERS],
    variables=VARIABLES,
)
