from helpers.late_copies import late_copies  # noqa: F401 - a fixture of the tests here
