"""A measured profile, and a decoder that chooses its tree sizes by it.

python examples/calibrate_and_decode.py [TARGET]
"""

import sys

from rooftree import CalibrationSettings, ProfileChoice, TreeDecoder, calibrate


def main(target: str | None = None) -> None:
    settings = CalibrationSettings(
        target=target, contexts=(64, 128), max_nodes=31, time_budget_s=20
    )
    measured = calibrate(settings)
    print(f"profile: {measured.path}")
    print(f"picture: {measured.picture}")
    if measured.aside:
        print(f"the stored profile stays for others: {measured.aside}")

    profile = ProfileChoice(path=measured.path)
    decoder = TreeDecoder.from_pretrained(target, profile=profile, max_nodes=31)
    print(decoder.profile_line)
    print(decoder.generate("One, two, three, one, two,", max_new_tokens=24).text)


if __name__ == "__main__":
    main(*sys.argv[1:2])
