"""Many runs from one command: composed and planned whole, then run one after another."""
