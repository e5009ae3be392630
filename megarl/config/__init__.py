"""The configuration: keys, rules between keys, and reports. Reading a configuration imports no torch."""
