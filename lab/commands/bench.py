"""`rooftree bench`: policies, drafters and peers decode the same prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from profiler.commands.options import (
    NamedValue,
    OutputPath,
    count_option,
    device_option,
    dtype_option,
    json_option,
    target_option,
    template_option,
)

if TYPE_CHECKING:
    from lab.bench.protocols import ProtocolRun
    from lab.bench.record import Result
    from lab.bench.session import BenchOptions


class EngineOption(NamedValue):
    """ENGINE:NAME=VALUE."""

    name = "engine:name=value"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, str, Any]:
        if isinstance(value, tuple):
            return value
        engine, colon, rest = str(value).partition(":")
        if not colon:
            self.fail(
                f"{value!r} does not name an engine, as vllm:enforce_eager=false.", param, ctx
            )
        return engine, *super().convert(rest, param, ctx)


@click.group(invoke_without_command=True)
@click.option(
    "--protocol",
    metavar="PAPER[:TABLE]",
    help="Prompts, samples, models, policies and settings of a paper's table, which the run fills: "
    "bastion, ddtree, dynatree, specblock or blockpilot. What is given beside it takes the place "
    "of the paper's; a drafter as PART=NAME, such as eagle3=FOLDER; of its policies only those "
    "of --policy run, as chain or chain@dflash@block=4.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Your copy of the protocol's sets: NAME.jsonl, NAME.parquet or a folder NAME of each, "
    "with the columns of the published set or a text `prompt`.",
)
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    help="Most prompts of each of the protocol's sets [default: the paper's].",
)
@target_option
@click.option(
    "--drafter",
    "drafters",
    multiple=True,
    help="As in generate; also A@adapt=bandit or A@adapt=always for a SpecBlock drafter that "
    "learns between texts. May be repeated [default: ngram].",
)
@click.option(
    "--prompts",
    "files",
    multiple=True,
    type=click.Path(path_type=Path),
    help="JSONL file with id, category and prompt or messages, as in generate. May be repeated "
    "[default: five built in].",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    help="As in generate, with every drafter; fixed:59@DRAFTER with that one alone; sweep, shape "
    "or estimator for a group; transformers:plain, :prompt-lookup, :assisted or :none for arms of "
    "transformers' generate [default: all that can run]. May be repeated; plain always runs "
    "[default: chain, bastion].",
)
@click.option(
    "--engine",
    "engines",
    multiple=True,
    help="Another engine as a peer: vllm, openvino or llama.cpp, and the Python that has it "
    "[default: this one]. May be repeated.",
)
@click.option(
    "--engine-option",
    "engine_options",
    multiple=True,
    type=EngineOption(),
    help="Option of an engine, as vllm:modes=ngram-3,ngram-5 or openvino:model=FOLDER. May be "
    "repeated.",
)
@template_option
@count_option("--new-tokens", "New tokens of each text.", default=128)
@click.option(
    "--ignore-eos", is_flag=True, help="Go on after the end of a text, to the full length."
)
@click.option(
    "--temperature",
    default=0.0,
    show_default=True,
    type=click.FloatRange(min=0),
    help="0 takes the argmax.",
)
@click.option(
    "--repeat",
    "repeats",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Times that each arm decodes each prompt.",
)
@click.option(
    "--same-text",
    is_flag=True,
    help="Make all arms but the peers write plain decoding's text, in low precision too.",
)
@click.option(
    "--by-round",
    is_flag=True,
    help="Let all arms but the peers decode a prompt together, a round each in turn, so that slow "
    "moments of the machine affect all alike.",
)
@device_option
@dtype_option
@click.option("--output", type=OutputPath(), help="Write the result to this file, as JSON.")
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool, **values: Any) -> None:
    """Decode the same prompts with every policy, transformers' generate and other engines.

    Arms take turns prompt by prompt after a warm-up. All are timed by one clock, and
    their tokens are counted alike. Plain decoding always runs; ratios to it come with
    95 % intervals over prompts.
    """
    if ctx.invoked_subcommand is not None:
        return
    _check_policies(values["policies"])
    _report(_run(ctx, values), as_json=as_json)
    if values["output"] is not None:
        click.echo(f"result: {values['output']}", err=as_json)


@command.command(short_help="Show a stored result.")
@click.argument("path", type=click.Path(path_type=Path))
@json_option
def show(path: Path, as_json: bool) -> None:
    """Print the tables of a stored result."""
    from lab.bench.record import read_result

    _report(read_result(path), as_json=as_json)


def _check_policies(policies: tuple[str, ...]) -> None:
    from decoder.names import check_policy
    from lab.bench.record import PEER, STUDIES

    for policy in policies:
        if policy not in STUDIES and not policy.startswith(PEER):
            check_policy(policy.partition("@")[0])


def _options(ctx: click.Context, values: dict[str, Any]) -> BenchOptions:
    from dataclasses import fields

    from lab.bench.arms.choice import DEFAULT_POLICIES, ArmNames
    from lab.bench.engines.requested import requested_engines
    from lab.bench.record import PEER, STUDIES
    from lab.bench.session import BenchOptions

    run = _by_protocol(ctx, values)
    if run is not None:
        names = ("target", "new_tokens", "temperature", "dtype")
        values |= {name: getattr(run, name) for name in names}
        values |= {"template": run.protocol.template, "ignore_eos": run.protocol.ignore_eos}
    policies = [one for one in values["policies"] if not one.startswith(PEER)]
    peers = [one.removeprefix(PEER) for one in values["policies"] if one.startswith(PEER)]
    arms = ArmNames(
        policies=[one for one in policies if one not in STUDIES] or DEFAULT_POLICIES,
        drafters=values["drafters"] or ("ngram",),
        studies=[one for one in policies if one in STUDIES],
        peers=[one for one in peers if one != "none"] if peers else None,
    )
    values |= {"arms": arms if run is None else run.arms, "protocol": run}
    values |= {"engines": requested_engines(values["engines"], values["engine_options"])}
    names = {one.name for one in fields(BenchOptions)} & values.keys()
    return BenchOptions(**{name: values[name] for name in names})


def _by_protocol(ctx: click.Context, values: dict[str, Any]) -> ProtocolRun | None:
    """The run of `--protocol` with what is given beside it; None without one."""
    from lab.bench.protocols import Changes, plan_run
    from lab.papers.protocols import find_protocol

    given = {one for one in values if ctx.get_parameter_source(one) is ParameterSource.COMMANDLINE}
    wrong = {"data", "samples"} if values["protocol"] is None else {"files", "template"}
    if refused := given & wrong:
        names = ", ".join(one.opts[0] for one in ctx.command.params if one.name in refused)
        verb = "needs" if values["protocol"] is None else "does not go with"
        raise click.UsageError(f"{names} {verb} --protocol")
    if values["protocol"] is None:
        return None
    changes = Changes(**{name: values[name] for name in Changes.__slots__ if name in given})
    return plan_run(find_protocol(values["protocol"]), changes)


def _run(ctx: click.Context, values: dict[str, Any]) -> Result:
    from profiler.report.console import progress

    with progress("decoding") as (say, update):
        from lab.bench.session import Listeners, bench

        def count(done: int, of: int) -> None:
            update(done / of, f"{done} of {of}")

        return bench(_options(ctx, values), Listeners(say=say, progress=count))


def _report(result: Result, *, as_json: bool) -> None:
    from lab.bench.analysis.summary import derived
    from lab.bench.report.terminal import print_result
    from profiler.report.console import print_json

    if as_json:
        print_json(result.as_dict() | derived(result), one_line=True)
    else:
        print_result(result)
