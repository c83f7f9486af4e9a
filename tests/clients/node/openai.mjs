// OpenAI's client for Node: chats, tools, responses and their streams.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.env.FORESAY_URL}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Weather?" }];
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const model = "toy";
const max = { max_tokens: 300 };
const tools = [{ type: "function", function: { name: "weather", parameters } }];

const whole = await client.chat.completions.create({ model, messages, tools, ...max });
const runner = client.chat.completions.stream({ model, messages, tools, ...max });
const streamed = await runner.finalChatCompletion();

const flat = [{ type: "function", name: "weather", parameters, strict: false }, { type: "web_search" }];
const ask = { model, input: "Weather?", tools: flat, max_output_tokens: 300 };
const response = await client.responses.create(ask);
const events = [];
for await (const event of await client.responses.create({ ...ask, stream: true })) events.push(event);

let refused = null;
try {
  await client.chat.completions.create({ model: "other", messages });
} catch (error) {
  refused = { status: error.status, code: error.code, name: error.constructor.name };
}
const models = (await client.models.list()).data.map((card) => card.id);

console.log(
  JSON.stringify({
    models,
    refused,
    whole: whole.choices[0].message,
    streamed: streamed.choices[0].message,
    response: response.output,
    warnings: response.warnings,
    last: events.at(-1).type,
    events: events.at(-1).response.output,
  }),
);
