/** Plays scenarios by their names: `node build/scenarios/driver.js TARGET`, lines on stdin and stdout. Source: sdk/scenarios.md. */

import { createInterface } from "node:readline";
import { HARM } from "./harm.js";
import { Failed, Lacks, Play, type Scenario } from "./play.js";
import { ROOMS } from "./rooms.js";
import { STORES } from "./stores.js";

const SCENARIOS: Readonly<Record<string, Scenario>> = { ...ROOMS, ...STORES, ...HARM };
const [, , target = ""] = process.argv;

if (target === "--names") {
  process.stdout.write(`${Object.keys(SCENARIOS).join("\n")}\n`);
  process.exit(0);
}

const say = (line: string): void => {
  process.stdout.write(`${line.replace(/\s*\n\s*/g, " ")}\n`);
};

const answers: ((line: string) => void)[] = [];

async function ask(...words: string[]): Promise<string> {
  say(`ask ${words.join(" ")}`);
  const line = await new Promise<string>((resolve) => answers.push(resolve));
  const [word, ...rest] = line.split(" ");
  if (word !== "done") {
    throw new Failed(`the harness refused ${words.join(" ")}: ${rest.join(" ")}`);
  }
  return rest.join(" ");
}

async function play(name: string, seed: number): Promise<void> {
  const scenario = SCENARIOS[name];
  if (!scenario) {
    say(`failed ${name} this driver does not know it`);
    return;
  }
  const own = new Play(target, seed, ask);
  try {
    await scenario(own);
    await own.close();
    say(`ok ${name}`);
  } catch (error) {
    await own.close().catch(() => undefined);
    if (error instanceof Lacks) {
      say(`lacks ${name} ${error.message}`);
    } else {
      console.error(error);
      say(`failed ${name} ${error instanceof Failed ? error.message : String(error)}`);
    }
  }
}

for await (const line of createInterface({ input: process.stdin })) {
  const [word, name = "", seed = "0"] = line.trim().split(" ");
  if (word === "play") {
    void play(name, Number(seed));
  } else if (line.trim() !== "") {
    answers.shift()?.(line);
  }
}
process.exit(0);
