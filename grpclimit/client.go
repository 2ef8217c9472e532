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
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/edge"
)

// ClientStore is the verbs of a store that a [Client] needs to share a quota with other processes,
// Allow and Pause: a *pgstore.Store or a *memstore.Store.
type ClientStore = edge.WaitStore

// ClientConfig configures a [Client].
type ClientConfig struct {
	// MaxWait bounds the waits of a call, before it is sent and between its tries: none lasts
	// beyond MaxWait after the call began, time under way included. The default is 30 seconds.
	MaxWait time.Duration

	// MaxTries is how often a call is sent at most. The default is 4; 1 never sends one again.
	MaxTries int

	// MaxPause is the longest that anything a server says holds calls back or pauses the limit
	// of all processes. When it is over, one call asks again. The default is 5 minutes.
	MaxPause time.Duration

	// Scope says which calls a server's word is about: those for which it returns the same.
	// The default is the connection's target, for all methods.
	Scope func(target, method string) string

	// Store and Limit space calls out by a limit of the client's own, which all processes with
	// the same store share: each try takes the request of Limit, waiting if need be, those of a
	// process in turn; and a ResourceExhausted pauses that limit for all. A Capacity of 1
	// spaces calls evenly. A call without a Limit takes nothing. A store that fails keeps the
	// call from being sent. The message is nil when a stream is opened. Both or neither.
	Store ClientStore
	Limit func(ctx context.Context, method string, message any) ratelimit.Request

	// Logger gets the faults of pausing. The default is slog.Default().
	Logger *slog.Logger
}

// Client has interceptors for clients, which keep to the limits that servers state.
//
// A ResourceExhausted or Unavailable that has a RetryInfo holds back all calls of its scope until
// the instant that it names. Then one call is sent, and with each that is not refused more. If
// that one is refused too, the wait is longer each time, at least 50 ms; after a RetryInfo that
// names no wait, at least half a second.
//
// A refused call is sent again if MaxWait, MaxTries and the context's deadline allow: a server
// that says when to try again has not begun to handle it. Otherwise the error is returned as it
// is. So is one without RetryInfo, which may be about a message that is too large. A call that would have to be held back
// for longer than allowed is not sent: the error is a *[WaitError].
//
// Client is safe for concurrent use.
type Client struct {
	config ClientConfig
	waiter edge.Waiter
}

// NewClient makes a Client; a nil config has all the defaults. An error is
// [ratelimit.ErrInvalid], and tells all that is wrong: a *[ratelimit.FieldError], or several
// joined.
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

// String is for logs: without it they would show the keys that calls wait for.
func (c *Client) String() string { return "grpclimit.Client" }

// WaitError is a call that was not sent, because it would have had to wait for longer than
// ClientConfig.MaxWait or its context allow. Its status is ResourceExhausted with RetryInfo, or
// that of its context's error.
type WaitError struct {
	Until time.Time // when it is worth another try, on this machine's clock
	Err   error     // [ratelimit.ErrRefused] when its own limit had no tokens in time; else nil, or a context's error
}

func (e *WaitError) Error() string {
	text := "grpclimit: not sent: it would have to wait until " + e.Until.UTC().Format(time.RFC3339)
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	return text
}

// Unwrap returns e.Err.
func (e *WaitError) Unwrap() error { return e.Err }

// GRPCStatus is for status.FromError and status.Code.
func (e *WaitError) GRPCStatus() *status.Status {
	if errors.Is(e.Err, context.Canceled) || errors.Is(e.Err, context.DeadlineExceeded) {
		return status.FromContextError(e.Err)
	}
	s := status.New(codes.ResourceExhausted, e.Error())
	detailed, err := s.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(max(0, time.Until(e.Until)))})
	if err != nil {
		return s
	}
	return detailed
}

// try is a call that is sent once or several times.
type try struct {
	client  *Client
	budget  *edge.Budget
	ctx     context.Context
	scope   string
	request ratelimit.Request
	round   edge.Round // in which it was sent last
	n       int        // how often it was sent
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

// again notes the limits that the call's answer states, an error or nil, and reports whether the
// call is to be sent again.
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

// Stream is a grpc.StreamClientInterceptor. It waits before a stream is opened, and heeds the
// server's answer. One that was refused is opened again if the client sends a single
// message in it: with the first RecvMsg, and Header says nothing before that. If it sends
// several, nobody keeps them, so the error is returned.
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
	stream grpc.ClientStream // the one that is open now
	sent   any
	closed bool

	answered bool // known to RecvMsg alone
}

// reopen opens the stream, and sends the messages sent before.
func (s *clientStream) reopen() error {
	stream, err := s.open()
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stream = stream
	if s.sent != nil {
		_ = stream.SendMsg(s.sent) // RecvMsg returns its error
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
