"""Forward times that other tools measured, read from their files and made into profiles.

`table` is what every reader returns, and reads CSV; `profiles` makes a profile.
The folder may import calibration/, profile/ and the modules beside.
"""
