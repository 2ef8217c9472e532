package grpclimit

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/edge"
)

// pushback is the trailer that tells clients with a retry policy when to try again.
const pushback = "grpc-retry-pushback-ms"

// answer returns the status of a call that is not let through.
func (l *Limiter) answer(ctx context.Context, e ratelimit.Event) error {
	switch e.Outcome {
	case ratelimit.OutcomeRefused, ratelimit.OutcomePaused:
		return l.refuse(ctx, &e)
	case ratelimit.OutcomeTooLarge:
		return tooLarge(e.Err)
	case ratelimit.OutcomeInvalid:
		return badRequest(e.Err)
	}
	if err := ctx.Err(); err != nil { // the client has gone
		return status.FromContextError(err).Err()
	}
	wait := l.limiter.FailureRetryAfter + rand.N(l.limiter.FailureRetryAfter)
	return later(ctx, codes.Unavailable, "the call's limits could not be asked", wait)
}

func (l *Limiter) refuse(ctx context.Context, e *ratelimit.Event) error {
	failure := &errdetails.QuotaFailure{}
	violated := func(name, description string) {
		failure.Violations = append(failure.Violations, &errdetails.QuotaFailure_Violation{Subject: name, Description: description})
	}
	if e.Permit != nil {
		text, description := "too many calls are under way", fmt.Sprintf("at most %d at a time", e.Permit.InFlight.Limit)
		if e.Permit.InFlight.Mode == ratelimit.ModeRefuse {
			text, description = "the call is refused by a limit's mode", "refused by its mode"
		}
		violated(e.Permit.InFlight.Name, description)
		return later(ctx, codes.ResourceExhausted, text, l.limiter.RefusedFor(e), failure)
	}
	for _, s := range edge.Told(e.Result) {
		switch {
		case s.OK:
		case s.Request.Mode == ratelimit.ModeRefuse:
			violated(ratelimit.NameOf(s.Request.Limit), "refused by its mode")
		default:
			violated(ratelimit.NameOf(s.Request.Limit), fmt.Sprintf("%d are left", s.Remaining))
		}
	}
	return later(ctx, codes.ResourceExhausted, "the call exceeds a quota", l.limiter.RefusedFor(e), failure)
}

// later returns a status that says when to try again, in RetryInfo and in the trailer.
func later(ctx context.Context, code codes.Code, text string, wait time.Duration, details ...protoadapt.MessageV1) error {
	ms := (wait + time.Millisecond - 1) / time.Millisecond
	_ = grpc.SetTrailer(ctx, metadata.Pairs(pushback, strconv.FormatInt(int64(ms), 10))) // without a stream, in a test of a handler, there is none
	return delayed(status.Newf(code, "%s: try again in %v", text, wait), wait, details...).Err()
}

// delayed adds details to a status, and when to try again.
func delayed(s *status.Status, wait time.Duration, details ...protoadapt.MessageV1) *status.Status {
	if detailed, err := s.WithDetails(append(details, &errdetails.RetryInfo{RetryDelay: durationpb.New(wait)})...); err == nil {
		return detailed
	}
	return s
}

func tooLarge(err error) error {
	if would := edge.TooLarge(err); would != "" {
		return status.Error(codes.InvalidArgument, "the call "+would+": ask for less")
	}
	return status.Error(codes.InvalidArgument, "the call costs more than its limit ever grants")
}

func badRequest(err error) error {
	if s := statusOf(err); s != nil {
		return s.Err()
	}
	return status.Error(codes.InvalidArgument, cmp.Or(edge.Field(err), "the call cannot be counted"))
}
