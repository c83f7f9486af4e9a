// Vercel's AI SDK with its provider for OpenAI-compatible servers (chats) and with OpenAI's own (responses).
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const baseURL = `${process.env.FORESAY_URL}/v1`;
const chat = createOpenAICompatible({ name: "foresay", baseURL, includeUsage: true });
const responses = createOpenAI({ baseURL, apiKey: "none" });
const inputSchema = jsonSchema({
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
});
const asked = [];
const weather = tool({
  description: "Tells the weather",
  inputSchema,
  execute: async ({ city }) => {
    asked.push(city);
    return `It rains in ${city}`;
  },
});
const ask = { prompt: "Weather?", tools: { weather }, stopWhen: stepCountIs(3), maxRetries: 0, maxOutputTokens: 300 };

const said = {};
for (const [name, model] of [["chat", chat("toy")], ["responses", responses.responses("toy")]]) {
  const whole = await generateText({ model, ...ask });
  const stream = streamText({ model, ...ask });
  const parts = [];
  for await (const part of stream.fullStream) parts.push(part.type);
  said[name] = {
    text: whole.text,
    steps: whole.steps.length,
    usage: whole.totalUsage,
    streamed: await stream.text,
    reasoning: (await stream.steps)[0].reasoningText,
    errors: parts.filter((type) => type === "error").length,
  };
}
console.log(JSON.stringify({ ...said, asked }));
