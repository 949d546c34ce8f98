// Calls through @grpc/grpc-js: node calls.js PROTO HOST:PORT [ROOT.pem]
// Prints a line of JSON for each check: {"check": NAME, "error": TEXT or null}.
'use strict';
const fs = require('fs');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const [proto, address, root] = process.argv.slice(2);
const definition = loader.loadSync(proto, {keepCase: true, includeDirs: [require('path').dirname(proto)]});
const service = grpc.loadPackageDefinition(definition).inference.GRPCInferenceService;
const credentials = root ? grpc.credentials.createSsl(fs.readFileSync(root)) : grpc.credentials.createInsecure();
const client = new service(address, credentials, {'grpc.max_receive_message_length': -1});
const RESPONSES = 4;

function request(model, values) {
  return {model_name: model, inputs: [{name: 'x', datatype: 'FP32', shape: [1, values.length]}],
          raw_input_contents: [Buffer.from(values.buffer)]};
}
const small = (model) => request(model, Float32Array.from([RESPONSES, RESPONSES, RESPONSES]));
const large = () => request('echo', Float32Array.from({length: 5 << 18}, (_, i) => i));
const deadline = (secs) => ({deadline: Date.now() + 1000 * secs});

function infer(message, options = deadline(60)) {
  return new Promise((resolve) => client.ModelInfer(message, new grpc.Metadata(), options,
    (error, answer) => resolve({code: error ? error.code : 0, answer})));
}
function stream(messages) {
  return new Promise((resolve) => {
    const answers = [];
    const call = client.ModelStreamInfer(new grpc.Metadata(), deadline(60));
    call.on('data', (answer) => answers.push(answer));
    call.on('error', (error) => resolve([error.code]));
    call.on('end', () => resolve(answers));
    messages.forEach((message) => call.write(message));
    call.end();
  });
}
function same(found, expected, what) {
  if (found !== expected) throw new Error(`${what}: ${found} instead of ${expected}`);
}
function echoed(result, message) {
  same(result.code, 0, 'status');
  if (!result.answer.raw_output_contents[0].equals(message.raw_input_contents[0])) throw new Error('other values');
}

const checks = {
  'unary': async () => { for (let i = 0; i < 20; i++) { const sent = small('echo'); echoed(await infer(sent), sent); } },
  '200 at a time': async () => {
    const sent = small('echo');
    (await Promise.all(Array.from({length: 200}, () => infer(sent)))).forEach((result) => echoed(result, sent));
  },
  '5 MB': async () => { for (let i = 0; i < 3; i++) { const sent = large(); echoed(await infer(sent), sent); } },
  'streams': async () => same((await stream([small('counted'), small('counted'), small('counted')])).length,
                              3 * RESPONSES, 'responses'),
  'errors': async () => same((await infer(small('no_model'))).code, grpc.status.NOT_FOUND, 'status'),
  'deadlines': async () => same((await infer(small('slow'), deadline(0.2))).code, grpc.status.DEADLINE_EXCEEDED, 'status'),
  'cancellation': async () => {
    const code = await new Promise((resolve) => {
      const call = client.ModelInfer(small('slow'), (error) => resolve(error.code));
      setTimeout(() => call.cancel(), 300);
    });
    same(code, grpc.status.CANCELLED, 'status');
  },
};

(async () => {
  for (const [check, run] of Object.entries(checks)) {
    let error = null;
    try { await run(); } catch (failure) { error = String(failure.message); }
    console.log(JSON.stringify({check, error}));
  }
  client.close();
})();
