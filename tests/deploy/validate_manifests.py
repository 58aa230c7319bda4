"""Run by the interpreter that has kubernetes-validate: manifests against the schemas of several Kubernetes versions.

Standard input: JSON {"versions": [...], "manifests": [...]}; standard output: JSON list of faults, empty when there
are none.
"""

import functools
import json
import sys

import kubernetes_validate
from kubernetes_validate import utils

# Schemas are read once, not once per manifest: a tenth of the time.
utils.schema_contents = functools.cache(utils.schema_contents)


def main():
    asked = json.load(sys.stdin)
    known = {version.rsplit(".", 1)[0] for version in utils.all_versions()}
    faults = [f"no schemas for Kubernetes {version}" for version in asked["versions"] if version not in known]
    for version in asked["versions"]:
        for manifest in asked["manifests"]:
            name = f"{version} {manifest['kind']}/{manifest['metadata']['name']}"
            try:
                kubernetes_validate.validate(manifest, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                where = ".".join(map(str, error.path))
                faults.append(f"{name}: {where}: {error.message[:300]}")
            except kubernetes_validate.SchemaNotFoundError:
                faults.append(f"{name}: no such kind")
    json.dump(faults, sys.stdout)


if __name__ == "__main__":
    main()
