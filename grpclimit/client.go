package grpclimit

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/edge"
)

// ClientStore has the verbs by which a [Client] shares a quota with other processes: Allow and
// Pause. A *pgstore.Store or a *memstore.Store has them.
type ClientStore = edge.WaitStore

// ClientConfig configures a [Client].
type ClientConfig struct {
	// MaxWait bounds the waits of a call, before it is sent and between its tries: no wait ends
	// later than MaxWait after the call began. The default is 30 seconds.
	MaxWait time.Duration

	// MaxTries is the largest number of times that a call is sent. The default is 4; with 1 it is
	// sent once.
	MaxTries int

	// MaxPause bounds how long anything that a server says may hold calls back, or pause the limit
	// of all processes. After it one call asks again. The default is 5 minutes.
	MaxPause time.Duration

	// Scope groups calls: what a server says about one holds for all calls with the same scope. The
	// default is the connection's target, for all methods.
	Scope func(target, method string) string

	// Store and Limit space calls by a limit of your own, which all processes with the same store
	// share. Each try takes the request that Limit returns, and waits for it in the order of
	// arrival. A ResourceExhausted pauses that limit for all processes. A Capacity of 1 spaces
	// calls evenly. A request without a Limit takes nothing. If the store fails, the call is not
	// sent. The message is nil when a stream is opened. Set both or neither.
	Store ClientStore
	Limit func(ctx context.Context, method string, message any) ratelimit.Request

	// Logger gets the errors of pausing. The default is slog.Default().
	Logger *slog.Logger
}

// Client has interceptors for clients, which keep to the limits that servers state.
//
// A ResourceExhausted or Unavailable with RetryInfo is a refusal. It holds back all calls of its
// scope until the instant that it names. Then one call is sent, and more after each success. From
// the second refusal in a row on the wait is at least 50 ms, and doubles. A RetryInfo that names no
// wait means at least half a second.
//
// A refused call is sent again within MaxWait, MaxTries and its deadline, since the server has not
// begun to handle it. Otherwise its error is returned, as is an error without RetryInfo, which may
// mean a message that is too large. A call that would wait for too long is not sent: the error is a
// *[WaitError].
//
// Client is safe for concurrent use.
type Client struct {
	config ClientConfig
	waiter edge.Waiter
}

// NewClient returns a Client; a nil config holds the defaults. Errors are [ratelimit.ErrInvalid]
// and report every fault: a *[ratelimit.FieldError], or several joined.
func NewClient(config *ClientConfig) (*Client, error) {
	c := &Client{}
	if config != nil {
		c.config = *config
	}
	c.waiter = edge.Waiter{
		Package: "grpclimit", MaxWait: c.config.MaxWait, MaxTries: c.config.MaxTries, MaxPause: c.config.MaxPause,
		Store: c.config.Store, Logger: c.config.Logger,
		NotSent: func(until time.Time, err error) error { return &WaitError{until, err} },
	}
	f := edge.Faults{Package: "grpclimit"}
	if c.waiter.Init(&f, c.config.Limit != nil); f.Err() != nil {
		return nil, f.Err()
	}
	if c.config.Scope == nil {
		c.config.Scope = func(target, _ string) string { return target }
	}
	return c, nil
}

// String keeps the keys that calls wait for out of logs.
func (c *Client) String() string { return "grpclimit.Client" }

// WaitError reports a call that was not sent, because its wait would have exceeded
// ClientConfig.MaxWait or its context's deadline. Its status is ResourceExhausted with RetryInfo,
// or that of its context's error.
type WaitError struct {
	Until time.Time // when to try again, on this machine's clock
	Err   error     // [ratelimit.ErrRefused] if the client's own limit had no tokens in time; otherwise nil or a context's error
}

func (e *WaitError) Error() string { return edge.NotSent("grpclimit", e.Until, e.Err) }

// Unwrap returns e.Err.
func (e *WaitError) Unwrap() error { return e.Err }

// GRPCStatus returns the status, for status.FromError and status.Code.
func (e *WaitError) GRPCStatus() *status.Status {
	if errors.Is(e.Err, context.Canceled) || errors.Is(e.Err, context.DeadlineExceeded) {
		return status.FromContextError(e.Err)
	}
	return delayed(status.New(codes.ResourceExhausted, e.Error()), max(0, time.Until(e.Until)))
}

// try is one call and its tries.
type try struct {
	client  *Client
	budget  *edge.Budget
	ctx     context.Context
	scope   string
	request ratelimit.Request
	round   edge.Round // the scope of the last try
	n       int        // the number of tries so far
}

func (c *Client) begin(ctx context.Context, cc *grpc.ClientConn, method string, message any) (*try, error) {
	if c == nil || c.config.Scope == nil {
		return nil, edge.Invalid("grpclimit", "Client", nil, "must be made by NewClient")
	}
	t := &try{client: c, budget: c.waiter.Budget(ctx), ctx: ctx, scope: c.config.Scope(cc.Target(), method)}
	if c.config.Limit != nil {
		t.request = c.config.Limit(ctx, method, message)
	}
	return t, nil
}

// turn waits until the call may be sent.
func (t *try) turn() (err error) {
	t.n++
	t.round, err = t.client.waiter.Turn(t.budget, t.scope, t.request)
	if err != nil && err == t.ctx.Err() {
		return status.FromContextError(err).Err()
	}
	return err
}

// again notes what the call's answer says about limits; err may be nil. It reports whether to send
// the call again.
func (t *try) again(err error) bool {
	answer := readAnswer(err)
	wait := t.client.waiter.Heed(t.budget, t.scope, t.round, t.request, answer)
	return answer.Refused && t.client.waiter.Again(t.budget, wait, t.n)
}

// readAnswer returns the limits that an error states.
func readAnswer(err error) (a edge.Answer) {
	s, _ := status.FromError(err)
	if s.Code() != codes.ResourceExhausted && s.Code() != codes.Unavailable {
		return a
	}
	for _, d := range s.Details() {
		if info, ok := d.(*errdetails.RetryInfo); ok {
			a.Refused, a.Pause = true, s.Code() == codes.ResourceExhausted
			a.Wait = min(max(a.Wait, info.GetRetryDelay().AsDuration()), ratelimit.MaxSpan)
		}
	}
	return a
}

// Unary is a grpc.UnaryClientInterceptor.
func (c *Client) Unary(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	t, err := c.begin(ctx, cc, method, req)
	if err != nil {
		return err
	}
	for {
		if err := t.turn(); err != nil {
			return err
		}
		err := invoker(ctx, method, req, reply, cc, opts...)
		if !t.again(err) {
			return err
		}
	}
}

// Stream is a grpc.StreamClientInterceptor. It waits before it opens a stream, and heeds the
// server's answer. A refused stream is opened again if the client sends a single message in it: the
// first RecvMsg does so, and Header returns nothing before. If the client sends several messages
// the error is returned, since they are not kept.
func (c *Client) Stream(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	t, err := c.begin(ctx, cc, method, nil)
	if err != nil {
		return nil, err
	}
	s := &clientStream{try: t, replays: !desc.ClientStreams}
	s.open = func() (grpc.ClientStream, error) { return streamer(ctx, desc, cc, method, opts...) }
	for {
		if err := t.turn(); err != nil {
			return nil, err
		}
		err := s.reopen()
		if err == nil {
			return s, nil
		}
		if !t.again(err) {
			return nil, err
		}
	}
}

// clientStream is a stream that is opened again if the server refuses it.
type clientStream struct {
	try     *try
	replays bool
	open    func() (grpc.ClientStream, error)

	mu     sync.Mutex
	stream grpc.ClientStream // the stream that is open now
	sent   any
	closed bool

	answered bool // RecvMsg has seen the answer
}

// reopen opens the stream and sends its messages again.
func (s *clientStream) reopen() error {
	stream, err := s.open()
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stream = stream
	if s.sent != nil {
		_ = stream.SendMsg(s.sent) // RecvMsg returns the error
	}
	if s.closed {
		_ = stream.CloseSend()
	}
	return nil
}

func (s *clientStream) current() grpc.ClientStream {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stream
}

// The methods of grpc.ClientStream.

func (s *clientStream) Header() (metadata.MD, error) { return s.current().Header() }

func (s *clientStream) Trailer() metadata.MD { return s.current().Trailer() }

func (s *clientStream) Context() context.Context { return s.current().Context() }

func (s *clientStream) SendMsg(m any) error {
	if !s.replays {
		return s.current().SendMsg(m)
	}
	s.mu.Lock()
	s.sent = m
	s.mu.Unlock()
	return s.current().SendMsg(m)
}

func (s *clientStream) CloseSend() error {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	return s.current().CloseSend()
}

func (s *clientStream) RecvMsg(m any) error {
	for {
		err := s.current().RecvMsg(m)
		if s.answered {
			return err
		}
		refusal := err
		if errors.Is(err, io.EOF) {
			refusal = nil
		}
		if s.answered = !s.try.again(refusal) || !s.replays; s.answered {
			return err
		}
		if err = s.try.turn(); err == nil {
			err = s.reopen()
		}
		if s.answered = err != nil; s.answered {
			return err
		}
	}
}
