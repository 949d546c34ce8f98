"""The searches of INT8 builds: constants chosen again without one of the models, and targets beside NNCF's."""
