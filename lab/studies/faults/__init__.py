"""The fault campaign: what users, disks and other people's files do, and what must not come of it.

`python -m lab.studies.faults` mutates every file format that the tool reads, kills its long
commands at random moments, and tries full disks, odd homes, planted links, threads and long runs.
A failure is an exception that is no error of one line, a hang, a wrong text, a lost sample, a
broken file, a message of more than 700 letters, or a file overwritten elsewhere. Every input has
a number: the same seed and number give it again.
"""
